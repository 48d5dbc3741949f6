"""``tune-many`` against ``tune`` on the same basis, and what it refuses, writes and goes on from."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from peft import get_peft_model

from forked import start
from frozencore import FrozenCoreConfig, calibrate, load_basis
from frozencore.adapter.bases import basis_fingerprint
from frozencore.adapter.layer import frozen_core_layers
from frozencore.errors import ArtifactError, ConfigError, DataError, FrozenCoreError, TrainingError
from frozencore.tune.adapt import Shared, calibration_batches
from frozencore.tune.calibrate_only import execute_calibration
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.locate import find_tenants
from frozencore.tune.many.run import TenantOutcome, execute_many
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import Failure, TunedRecord, read_record
from frozencore.tune.run import execute
from small_tenants import SIZES, adapter_in, config_of, cores_in, difference, inputs_of, silent


def test_the_basis_is_a_plain_calibration_on_the_rows_that_a_run_of_each_tenant_would_calibrate_on(
    tenants: Path, tmp_path: Path
) -> None:
    size = 10  # more rows than anna has to train on, and fewer than the others have
    config = config_of(tenants, calibration_size=size)
    execute_calibration(config, tmp_path / "out", silent, of_tenants=True)
    alone = [inputs_of(config_of(tenants / f"{name}.jsonl", calibration_size=size)) for name in SIZES]
    sizes = [len(one.rows.calibration) for one in alone]
    assert sizes[0] < size
    assert sizes[1:] == [size, size]
    rows = [row for one in alone for row in one.rows.calibration]
    model = get_peft_model(alone[0].model, FrozenCoreConfig(r=4, task_type="CAUSAL_LM"))
    batches = calibration_batches(rows, alone[0].encoder.pad_id)
    calibrate(model, batches, options=config.method.calibration, progress=False)
    saved = load_basis(tmp_path / "out" / "basis")
    for name, layer in frozen_core_layers(model, "default").items():
        assert all(torch.equal(X, Y) for X, Y in zip(saved.layers[name], layer.factors("default")[:2], strict=True))
    assert str(saved.calibrated_on).startswith(f"{sum(sizes)} rows of tenants, ")
    with pytest.raises(ArtifactError, match="already holds a calibration"):
        execute_calibration(config, tmp_path / "out", silent, of_tenants=True)


def test_training_tenants_calibrates_on_the_same_rows(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    out, records = together
    execute_calibration(config_of(tenants, select_checkpoint="epoch"), tmp_path / "out", silent, of_tenants=True)
    for file in ("basis.safetensors", "basis.json"):
        assert (tmp_path / "out" / "basis" / file).read_bytes() == (out / "basis" / file).read_bytes()
    assert len({record.hashes.calibration for record in records.values()}) == 1


def test_a_tenant_of_tune_many_is_that_of_tune_on_the_same_basis(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    (out, records), name = together, "ben"
    config = config_of(tenants / f"{name}.jsonl", select_checkpoint="epoch")
    alone = execute(config, tmp_path / "alone", silent, shared=Shared(bases=load_basis(out / "basis")))
    record = records[name]
    assert isinstance(record, TunedRecord)
    assert record.training.losses == pytest.approx(alone.training.losses, rel=1e-5)
    assert record.held_out_loss_before == pytest.approx(alone.held_out_loss_before, rel=1e-5)
    assert record.held_out_loss == pytest.approx(alone.held_out_loss, rel=1e-5)
    assert (record.selection.kept_step, record.rows) == (alone.selection.kept_step, alone.rows)
    assert (record.resolved, record.values_at_once) == (alone.resolved, alone.values_at_once)
    for key in ("model", "train", "evaluation", "validation", "basis"):
        assert getattr(record.hashes, key) == getattr(alone.hashes, key)
    assert difference(cores_in(out / name), cores_in(tmp_path / "alone")) < 1e-5


def test_each_tenant_gets_an_adapter_on_the_common_basis_and_a_record(
    together: tuple[Path, dict[str, TenantOutcome]],
) -> None:
    out, records = together
    assert sorted(path.name for path in out.iterdir()) == ["anna", "basis", "ben", "cleo"]
    assert list(records) == list(SIZES)
    hashes = set()
    for name, record in records.items():
        assert isinstance(record, TunedRecord)
        assert sorted(path.name for path in (out / name).iterdir()) == ["adapter", "result.json"]
        assert read_record((out / name / "result.json").read_text()) == record
        assert (record.company.tenants, record.company.slots) == (3, 2)
        assert record.config.data.endswith(f"{name}.jsonl")
        assert record.held_out_loss < record.held_out_loss_before
        hashes |= {basis_fingerprint(adapter_in(out / name)), record.hashes.basis}
        assert (out / name / "adapter" / "adapter_model.safetensors").stat().st_size < 16 * 4**2 * 4 + 1024
        assert "rows of tenants" in (out / name / "adapter" / "README.md").read_text()
    assert len(hashes) == 1


def test_a_saved_basis_spares_the_pass_and_is_not_copied(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    basis, stages = together[0] / "basis", set()
    config = make_config(
        model=str(pocket_model_path()), data=tenants, basis=str(basis), batch_size=2, accumulation=2, epochs=2,
        device="cpu", select_checkpoint="epoch",
    )  # fmt: skip
    records = execute_many(config, tmp_path / "out", lambda stage, *_: stages.add(stage), num_slots=2)
    assert "calibration" not in stages
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list(SIZES)
    for name, record in together[1].items():
        assert records[name].training.losses == record.training.losses
        assert records[name].hashes.basis == record.hashes.basis
        adapters = [
            folder / name / "adapter" / "adapter_model.safetensors" for folder in (together[0], tmp_path / "out")
        ]
        assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_a_killed_run_goes_on_to_the_same_adapters(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    whole, _ = together
    words = ["tune-many", "--model", str(pocket_model_path()), "--tenants", str(tenants), "--rank", "4"]
    words += ["--calibration-size", "16", "--batch-size", "2", "--accumulation", "2", "--epochs", "2", "--slots", "2"]
    words += ["--select-checkpoint", "epoch", "--device", "cpu", "--output", str(tmp_path / "cut")]
    process = start(words, tmp_path)
    while process.is_alive() and not list((tmp_path / "cut").glob("*/result.json")):
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    config = config_of(tenants, select_checkpoint="epoch")
    with pytest.raises(TrainingError, match="cut holds an interrupted run, which has kept .* with --resume"):
        execute_many(config, tmp_path / "cut", silent, num_slots=2)
    with pytest.raises(FrozenCoreError, match="made with others: tenants"):
        execute_many(
            config_of(tenants, epochs=3, select_checkpoint="epoch"), tmp_path / "cut", silent, num_slots=2, resume=True
        )
    shutil.copytree(tenants, tmp_path / "renamed")
    (tmp_path / "renamed" / "ben.jsonl").rename(tmp_path / "renamed" / "bert.jsonl")
    other = config_of(tmp_path / "renamed", select_checkpoint="epoch")
    with pytest.raises(FrozenCoreError, match="made with others: tenants") as refused:
        execute_many(other, tmp_path / "cut", silent, num_slots=2, resume=True)
    assert "\n" not in str(refused.value)
    stages: set[str] = set()
    records = execute_many(config, tmp_path / "cut", lambda stage, *_: stages.add(stage), num_slots=2, resume=True)
    assert stages == {"load", "train"}
    assert list(records) == list(SIZES)
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["anna", "basis", "ben", "cleo"]
    for name in SIZES:
        adapters = [folder / name / "adapter" / "adapter_model.safetensors" for folder in (whole, tmp_path / "cut")]
        assert adapters[0].read_bytes() == adapters[1].read_bytes()
    with pytest.raises(ArtifactError, match=r"already holds a finished run of 'anna' \(3 in all\)"):
        execute_many(config, tmp_path / "cut", silent, num_slots=2, resume=True)


def test_a_resumed_run_that_lists_its_tenants_in_another_order_gives_each_its_own(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    def stop(stage: str, *_: object) -> None:
        if stage == "train":
            raise KeyboardInterrupt

    def config_in(order: tuple[str, ...]) -> RunConfig:
        listed = tmp_path / f"{order[0]}-first.yaml"
        listed.write_text("".join(f"{name}: {tenants}/{name}.jsonl\n" for name in order))
        return config_of(listed, select_checkpoint="epoch")

    with pytest.raises(KeyboardInterrupt):
        execute_many(config_in(("anna", "ben", "cleo")), tmp_path / "cut", stop, num_slots=2)
    resumed = execute_many(config_in(("cleo", "anna", "ben")), tmp_path / "cut", silent, num_slots=2, resume=True)
    assert list(resumed) == ["cleo", "anna", "ben"]
    for name, record in together[1].items():
        assert resumed[name].held_out_loss_before == record.held_out_loss_before
        assert resumed[name].training.losses == record.training.losses
        mine, theirs = (cores_in(out / name) for out in (tmp_path / "cut", together[0]))
        assert all(torch.equal(mine[layer], R) for layer, R in theirs.items())


def test_a_bad_row_of_one_tenant_is_refused_in_one_line_before_anything_is_written(
    tenants: Path, tmp_path: Path
) -> None:
    shutil.copytree(tenants, tmp_path / "tenants")
    with (tmp_path / "tenants" / "ben.jsonl").open("a") as file:
        file.write('{"prompt": 3, "completion": "four"}\n')
    told: list[str] = []
    with pytest.raises(DataError, match=r"Tenant 'ben', .*ben\.jsonl: Row row-22: .*'prompt'") as error:
        execute_many(config_of(tmp_path / "tenants"), tmp_path / "out", lambda stage, *_: told.append(stage))
    assert "\n" not in str(error.value)
    assert set(told) == {"load"}
    assert not (tmp_path / "out").exists()


def test_what_a_tenant_is_called_and_where_its_rows_are_is_checked(tenants: Path, tmp_path: Path) -> None:
    listed = tmp_path / "tenants.yaml"
    listed.write_text(f"zoe: {tenants}/ben.jsonl\nadam: {tenants}/anna.jsonl\n")
    assert find_tenants(listed) == {"zoe": tenants / "ben.jsonl", "adam": tenants / "anna.jsonl"}
    assert list(find_tenants(tenants)) == list(SIZES)
    (tmp_path / "empty").mkdir()
    for path, rule in ((tmp_path / "empty", "holds none"), (tmp_path / "absent", "is neither")):
        with pytest.raises(DataError, match=rule):
            find_tenants(path)
    for content, rule in (
        ("- a", "one line each"),
        ("checkpoints: a.jsonl", "not basis or checkpoints"),
        ("a/b: c.jsonl", "Rename"),
        ("Basis: c.jsonl", "not basis or checkpoints"),
        ("Anna: a.jsonl\nanna: b.jsonl", "'Anna' and 'anna' would share a folder"),
        ("É: a.jsonl\né: b.jsonl", "would share a folder"),
        ("-rf: c.jsonl", "not '.' or '-' first"),
    ):
        listed.write_text(content)
        with pytest.raises(ConfigError, match=rule):
            find_tenants(listed)
    both = tmp_path / "both"
    both.mkdir()
    for suffix in ("jsonl", "parquet"):
        (both / f"anna.{suffix}").touch()
    with pytest.raises(ConfigError, match="'anna' has anna.jsonl and anna.parquet"):
        find_tenants(both)


def test_options_that_make_no_sense_for_tenants_are_refused(tenants: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'lora' trains others"):
        execute_many(config_of(tenants, method="lora"), tmp_path, silent)
    with pytest.raises(ConfigError, match="^--report-to is for a run that trains alone, but tenants"):
        execute_many(config_of(tenants, report_to=("tensorboard",)), tmp_path, silent)


def test_one_that_diverges_is_said_to_and_the_others_end(command, tenants: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def tune_many(*words: object) -> tuple[int, str, str]:
        few = ("--rank", "4", "--calibration-size", "16", "--accumulation", "2", "--device", "cpu")
        return command(
            "tune-many", "--model", "pocket", "--tenants", tenants, *few, "--output", tmp_path / "out", *words
        )

    status, out, _ = tune_many("--lr", "1e38", "--method", "random")
    assert status == 1
    for name in SIZES:
        failure = json.loads((tmp_path / "out" / name / "failure.json").read_text())
        assert failure["reason"] == "diverged"
        assert (tmp_path / "out" / name / "last-good-adapter" / "adapter_model.safetensors").is_file()
        assert f"{name}: Training diverged" in out
    assert isinstance(Failure.model_validate(failure), Failure)
    assert tune_many("--method", "random")[0] == 0
    for name in SIZES:  # nothing of the failure stays beside the record
        assert {path.name for path in (tmp_path / "out" / name).iterdir()} == {"adapter", "result.json"}


def test_a_dry_run_counts_the_rows_and_steps_that_are_then_recorded_and_shown_with_each_loss(  # type: ignore[no-untyped-def]
    command, tenants: Path, tmp_path: Path
) -> None:
    few = ("--rank", "4", "--calibration-size", "16", "--batch-size", "2", "--accumulation", "2", "--device", "cpu")
    few += ("--select-checkpoint", "2", "--patience", "99")
    words = ("tune-many", "--model", "pocket", "--tenants", tenants, *few, "--slots", "2", "--out", tmp_path / "out")
    status, out, err = command(*words, "--dry-run")
    assert (status, err, list(tmp_path.iterdir())) == (0, "", [])
    assert f"\ntenants: {tenants}\n" in out
    assert "How many is" in out.splitlines()[-1]
    status, shown, err = command(*words)
    assert (status, err) == (0, "")
    assert "3 tenants on one basis" in shown
    num_calibrated = 0
    for name in SIZES:
        record = json.loads((tmp_path / "out" / name / "result.json").read_text())
        used, steps = record["rows"], record["training"]["num_steps"]
        assert f"{name}: {used['trained']} rows to train on (" in out
        num_calibrated += min(16, used["trained"])
        assert f"), {used['scored']} to score; {steps} steps." in out
        assert f"{record['held_out_loss']:.3f}" in shown
    assert f"{record['values_at_once']:,} trained values each" in out
    assert f"3 tenants on a basis of {num_calibrated} rows, 2 at a time." in out
    assert command("tune-many", "--model", "pocket", "--out", tmp_path / "none")[0] == 2
