"""``tune-many`` against ``tune`` on the same basis, and what it refuses, writes and goes on from."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file

from forked import start
from frozencore import FrozenCoreConfig, basis_id, calibrate, load_basis
from frozencore.adapter.loaded_adapter import frozen_core_layers
from frozencore.errors import ArtifactError, ConfigError, DataError, TrainingError
from frozencore.progress import Progress, no_progress
from frozencore.tune.adapt import Precomputed
from frozencore.tune.calibrate_only import execute_calibration
from frozencore.tune.config import make_config
from frozencore.tune.locate import find_tenants
from frozencore.tune.many.finisher import TenantOutcome
from frozencore.tune.many.run import execute_many
from frozencore.tune.many.tenant_rows import read_tenants, tenants_of
from frozencore.tune.many.unfinished import Unfinished
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import Failure, read_record
from frozencore.tune.rows.token_batches import calibration_batches
from frozencore.tune.run import execute
from small_runs import (
    DIVERGES,
    SIZES,
    adapter_in,
    bytes_in,
    config_of,
    cores_in,
    difference,
    inputs_of,
    stability_content,
)
from tiny import same_tensors


def words_of(tenants: Path, out: Path, *more: str) -> list[str]:
    """The work of the fixture ``together`` as a command."""
    few = "--rank 4 --calibration-size 16 --batch-size 2 --accumulation 2 --epochs 2 --slots 2 --device cpu --bits 32"
    whole = ["tune-many", "--model", str(pocket_model_path()), "--tenants", str(tenants), *few.split()]
    return [*whole, "--select-checkpoint", "epoch", "--output", str(out), *more]


def stopping_at(step: int) -> Progress:
    """A progress that sends SIGTERM from this step on."""

    def told(stage: str, done: int, *_: object) -> None:
        if stage == "train" and done >= step:
            signal.raise_signal(signal.SIGTERM)

    return told


def require_equal_cores(folder: Path, expected: Path) -> None:
    """The same tenant in other company: products of other shapes may round differently."""
    found, wanted = (load_file(place / "adapter/adapter_model.safetensors") for place in (folder, expected))
    assert difference(found, wanted) < 1e-5


@pytest.fixture
def finished(together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path) -> Path:
    """A copy of the folder of a finished run."""
    shutil.copytree(together[0], tmp_path / "finished")
    return tmp_path / "finished"


def test_the_basis_is_a_plain_calibration_on_the_rows_that_a_run_of_each_tenant_would_calibrate_on(
    tenants: Path, tmp_path: Path
) -> None:
    size = 29  # in all, of three tenants; anna has fewer rows to train on than a third
    config = config_of(tenants, calibration_size=size)
    execute_calibration(config, tmp_path / "out", no_progress, of_tenants=True)
    alone = [inputs_of(config_of(tenants / f"{name}.jsonl", calibration_size=size)) for name in SIZES]
    few = len(alone[0].rows.calibration)
    sizes = [few, (size - few + 1) // 2, (size - few) // 2]
    assert few < size // 3
    rows = [row for one, count in zip(alone, sizes, strict=True) for row in one.rows.calibration[:count]]
    model = get_peft_model(alone[0].model, FrozenCoreConfig(r=4, task_type="CAUSAL_LM"))
    batches = calibration_batches(rows, alone[0].encoder.pad_id)
    calibrate(model, batches, options=config.method.calibration, progress=False)
    saved = load_basis(tmp_path / "out" / "basis")
    for name, layer in frozen_core_layers(model, "default").items():
        P, Q, _ = layer.factors("default")
        assert torch.equal(saved.layers[name].P, P)
        assert torch.equal(saved.layers[name].Q, Q)
    assert str(saved.calibrated_on).startswith(f"{sum(sizes)} rows of tenants, ")
    with pytest.raises(ArtifactError, match="already holds"):
        execute_calibration(config, tmp_path / "out", no_progress, of_tenants=True)


def test_training_tenants_calibrates_on_the_same_rows(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    out, records = together
    execute_calibration(config_of(tenants, select_checkpoint="epoch"), tmp_path / "out", no_progress, of_tenants=True)
    for file in ("basis.safetensors", "basis.json"):
        assert (tmp_path / "out" / "basis" / file).read_bytes() == (out / "basis" / file).read_bytes()
    assert len({record.hashes.calibration for record in records.values()}) == 1


def test_a_tenant_of_tune_many_is_that_of_tune_on_the_same_basis(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    (out, records), name = together, "ben"
    config = config_of(tenants / f"{name}.jsonl", select_checkpoint="epoch")
    alone = execute(config, tmp_path / "alone", no_progress, precomputed=Precomputed(bases=load_basis(out / "basis")))
    record = records[name]
    assert record.training.losses == pytest.approx(alone.training.losses, rel=1e-5)
    assert record.held_out_loss_before == pytest.approx(alone.held_out_loss_before, rel=1e-5)
    assert record.held_out_loss == pytest.approx(alone.held_out_loss, rel=1e-5)
    assert (record.selection.kept_step, record.rows) == (alone.selection.kept_step, alone.rows)
    assert (record.resolved, record.num_trainable) == (alone.resolved, alone.num_trainable)
    for key in ("model", "train", "evaluation", "validation", "basis"):
        assert getattr(record.hashes, key) == getattr(alone.hashes, key)
    assert difference(cores_in(out / name), cores_in(tmp_path / "alone")) < 1e-5


def test_each_tenant_gets_an_adapter_on_the_common_basis_and_a_record(
    together: tuple[Path, dict[str, TenantOutcome]],
) -> None:
    out, records = together
    assert sorted(path.name for path in out.iterdir()) == ["anna", "basis", "ben", "cleo", "run.yaml", "tenants.json"]
    assert list(records) == list(SIZES)
    hashes = set()
    for name, record in records.items():
        assert sorted(path.name for path in (out / name).iterdir()) == ["adapter", "result.json"]
        assert read_record((out / name / "result.json").read_text()) == record
        assert (record.company.tenants, record.company.slots) == (3, 2)
        assert record.config.data.endswith(f"{name}.jsonl")
        assert record.held_out_loss < record.held_out_loss_before
        hashes |= {basis_id(adapter_in(out / name)), record.hashes.basis}
        assert (out / name / "adapter" / "adapter_model.safetensors").stat().st_size < 16 * 4**2 * 4 + 1024
        card = (out / name / "adapter" / "README.md").read_text()
        assert "rows of tenants" in card
    assert len(hashes) == 1


def test_a_killed_run_keeps_its_results_and_trains_the_others_from_their_start(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    whole, _ = together
    process = start(words_of(tenants, tmp_path / "cut"), tmp_path)
    while process.is_alive() and not any((tmp_path / "cut" / name / "result.json").exists() for name in SIZES):
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    config = config_of(tenants, select_checkpoint="epoch")
    with pytest.raises(ArtifactError, match="already holds a finished run of .*--resume"):
        execute_many(config, tmp_path / "cut", no_progress, num_slots=2)
    done = {file.parent.name: file.stat().st_mtime_ns for file in (tmp_path / "cut").glob("*/result.json")}
    (tmp_path / "cut" / f".{next(iter(done))}.0123abcd.old").mkdir()  # as if it was killed a moment later,
    (tmp_path / "cut" / ".tenants.json.0123abcd.tmp").touch()  # or earlier
    resumed = execute_many(config, tmp_path / "cut", no_progress, num_slots=2, resume=True)
    assert list(resumed) == list(SIZES)
    files = ["basis", "run.yaml", "tenants.json"]
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == sorted([*files, *SIZES])
    for name in SIZES:
        require_equal_cores(tmp_path / "cut" / name, whole / name)
        record = read_record((tmp_path / "cut" / name / "result.json").read_text())
        assert record == resumed[name]
        assert record.calibration.num_tokens == together[1][name].calibration.num_tokens
        assert record.alignment == together[1][name].alignment
    for name, time_ns in done.items():
        assert (tmp_path / "cut" / name / "result.json").stat().st_mtime_ns == time_ns
    stages: set[str] = set()
    again = execute_many(config, tmp_path / "cut", lambda stage, *_: stages.add(stage), resume=True)
    assert again == resumed
    assert stages <= {"load"}


def test_a_newcomer_is_trained_beside_results_that_stand_on_a_named_basis(
    tenants: Path, together: tuple[Path, dict[str, TenantOutcome]], tmp_path: Path
) -> None:
    """The basis spares the pass, and is not copied."""
    basis, out, stages = str(together[0] / "basis"), tmp_path / "out", set()

    def train(*names: str) -> dict[str, TenantOutcome]:
        listed = tmp_path / "tenants.yaml"
        listed.write_text("".join(f"{name}: {tenants}/{name}.jsonl\n" for name in names))
        few = {
            "model": str(pocket_model_path()), "batch_size": 2, "accumulation": 2, "epochs": 2, "device": "cpu",
            "bits": 32,
        }  # fmt: skip
        config = make_config(data=listed, basis=basis, select_checkpoint="epoch", **few)
        return execute_many(config, out, lambda stage, *_: stages.add(stage), num_slots=2, resume=True)

    first = train("anna", "cleo")
    assert list(second := train("cleo", "ben", "anna")) == ["cleo", "ben", "anna"]
    assert {name: second[name] for name in first} == first
    assert "calibration" not in stages
    assert sorted(path.name for path in out.iterdir()) == [*SIZES, "run.yaml"]
    for name, record in together[1].items():
        require_equal_cores(out / name, together[0] / name)
        assert second[name].training.losses == pytest.approx(record.training.losses, rel=1e-5)
        assert second[name].hashes.basis == record.hashes.basis


def test_a_newcomer_to_a_basis_of_other_tenants_rows_is_trained_without_them(
    tenants: Path, finished: Path, tmp_path: Path
) -> None:
    more = shutil.copytree(tenants, tmp_path / "more")
    shutil.copy(more / "anna.jsonl", more / "dora.jsonl")
    with pytest.raises(ArtifactError, match="calibration rows .*without the others: --basis .*/basis"):
        execute_many(config_of(more, select_checkpoint="epoch"), finished, no_progress, resume=True)
    before = bytes_in(finished / "anna")
    for name in SIZES:
        (more / f"{name}.jsonl").unlink()
    alone = make_config(
        model=str(pocket_model_path()), data=more, basis=str(finished / "basis"), epochs=1, device="cpu"
    )
    outcomes = execute_many(alone, finished, no_progress)
    assert outcomes["dora"].hashes.basis == read_record((finished / "anna/result.json").read_text()).hashes.basis
    assert bytes_in(finished / "anna") == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "filora"}, "method fcca .now filora"),
        ({"damping": 10.0}, "damping"),
        ({"rank": 3}, "rank 4 .now 3"),
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"num_evaluation": 1}, "num_evaluation"),
    ],
)
def test_a_resumed_run_with_other_options_is_refused_and_changes_no_file(
    tenants: Path, finished: Path, options: dict[str, Any], named: str
) -> None:
    before = bytes_in(finished)
    with pytest.raises(ArtifactError, match=named):
        execute_many(
            config_of(tenants, **{"select_checkpoint": "epoch", **options}), finished, no_progress, resume=True
        )
    assert bytes_in(finished) == before


def test_a_run_that_was_killed_before_its_first_record_goes_on_on_its_own_basis_only(
    tenants: Path, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "cut", ignore=shutil.ignore_patterns(*SIZES))
    config = config_of(tenants, select_checkpoint="epoch")
    for options, named in (({"method": "filora"}, "method fcca"), ({"calibration_size": 8}, "calibration r")):
        with pytest.raises(ArtifactError, match=named):
            execute_many(
                config_of(tenants, select_checkpoint="epoch", **options), tmp_path / "cut", no_progress, resume=True
            )
    for damaged in (b"{}", b"{", b"\xff"):
        (tmp_path / "cut" / "tenants.json").write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"tenants.json is damaged .* Choose another --out"):
            execute_many(config, tmp_path / "cut", no_progress, resume=True)
    (tmp_path / "cut" / "tenants.json").unlink()
    with pytest.raises(ArtifactError, match="name that basis with --basis"):
        execute_many(config, tmp_path / "cut", no_progress, resume=True)


def test_a_run_that_was_killed_while_it_saved_its_basis_is_resumed(
    tenants: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = config_of(tenants, select_checkpoint="epoch"), tmp_path / "cut"
    with monkeypatch.context() as patched:
        patched.setattr("frozencore.tune.many.basis.save_basis", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            execute_many(config, out, no_progress)
    assert (out / "run.yaml").read_bytes() == (finished / "run.yaml").read_bytes()
    execute_many(config, out, no_progress, resume=True)
    for name in SIZES:
        require_equal_cores(out / name, finished / name)


def test_what_somebody_else_put_into_a_tenants_folder_is_refused_by_name_and_stays(
    tenants: Path, finished: Path, tmp_path: Path
) -> None:
    """A LoRA on anna's rows as ben's result, other rows under a tenant's name, and files of a user's own."""
    config, out, ben = config_of(tenants, select_checkpoint="epoch"), tmp_path / "out", tmp_path / "out" / "ben"

    def emptied() -> Path:
        shutil.rmtree(ben)
        return ben

    def notes() -> None:
        emptied().mkdir()
        (ben / "notes.txt").write_text("mine")

    of_bases = json.dumps(stability_content({"task": None}, 1.0))
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: execute(config_of(tenants / "anna.jsonl", method="lora"), emptied(), no_progress),
            "method lora .now fcca",
        ),
        (lambda: shutil.copytree(out / "anna", emptied()), "hash of train"),
        (notes, r"holds 'notes\.txt'"),
        (lambda: (ben / "result.json").write_text("{"), "is damaged"),
        (lambda: shutil.rmtree(ben / "adapter"), "no adapter"),
        (lambda: (ben / "result.json").write_text(of_bases), "no adapter"),
    ]
    for put, named in cases:
        shutil.copytree(finished, out)
        put()
        before = bytes_in(out)
        for resume, message in ((True, f"ben.*({named})"), (False, "ben|anna")):
            with pytest.raises(ArtifactError, match=message):
                execute_many(config, out, no_progress, resume=resume)
        assert bytes_in(out) == before
        shutil.rmtree(out)


def test_a_users_own_files_beside_a_result_and_beside_the_tenants_stay(
    tenants: Path, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "ben" / "notes.txt").write_text("mine")
    shutil.rmtree(tmp_path / "out" / "anna")
    (tmp_path / "out" / "anna").mkdir()
    execute_many(config_of(tenants, select_checkpoint="epoch"), tmp_path / "out", no_progress, num_slots=2, resume=True)
    assert {"result.json", "notes.txt"} <= {path.name for path in (tmp_path / "out" / "ben").iterdir()}
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    require_equal_cores(tmp_path / "out" / "anna", finished / "anna")


def test_a_run_of_the_other_command_in_a_tenants_folder_is_not_touched(
    tenants: Path, finished: Path, tmp_path: Path
) -> None:
    """``tune`` runs in ``out/ben`` when the tenants start, and when ben's training ends."""
    config, out = config_of(tenants, select_checkpoint="epoch"), tmp_path / "out"
    shutil.copytree(finished, out, ignore=shutil.ignore_patterns("ben", "cleo"))
    (out / "ben").mkdir()
    (out / "ben" / "run.yaml").write_text("rank: 4")
    other = os.open(out / "ben", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(TrainingError, match=r"another process is running in .*ben"):
        execute_many(config, out, no_progress, resume=True)
    os.close(other)
    shutil.rmtree(out / "ben")

    def begins(stage: str, *_: object) -> None:
        if stage == "train" and not (out / "ben").exists():
            (out / "ben").mkdir()
            (out / "ben" / "run.yaml").write_text("rank: 4")

    found = execute_many(config, out, begins, num_slots=1, resume=True)
    assert isinstance(found["ben"], Failure)
    assert "run.yaml" in found["ben"].message
    assert [path.name for path in (out / "ben").iterdir()] == ["run.yaml"]
    require_equal_cores(out / "cleo", finished / "cleo")


@pytest.mark.parametrize("held", ["result.json", "inputs.json", "adapter/adapter_config.json"])
def test_the_folder_of_another_run_is_not_taken_for_tenants(tenants: Path, tmp_path: Path, held: str) -> None:
    file = tmp_path / "out" / held
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(ArtifactError, match="holds a run of its own"):
        execute_many(config_of(tenants), tmp_path / "out", no_progress)
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [file]


def test_a_bad_row_of_one_tenant_is_refused_in_one_line_before_anything_is_written(
    tenants: Path, tmp_path: Path
) -> None:
    shutil.copytree(tenants, tmp_path / "tenants")
    with (tmp_path / "tenants" / "ben.jsonl").open("a") as file:
        file.write('{"prompt": 3, "completion": "four"}\n')
    told: list[str] = []
    with pytest.raises(DataError, match=r"Tenant 'ben', .*ben\.jsonl: Row row-22: .*'prompt'"):
        execute_many(config_of(tmp_path / "tenants"), tmp_path / "out", lambda stage, *_: told.append(stage))
    assert set(told) == {"load"}
    assert not (tmp_path / "out").exists()


def test_what_a_tenant_is_called_and_where_its_rows_are_is_checked(tenants: Path, tmp_path: Path) -> None:
    listed = tmp_path / "tenants.yaml"
    listed.write_text(f"zoe: {tenants}/ben.jsonl\nadam: {tenants}/anna.jsonl\n")
    assert find_tenants(listed) == {"zoe": tenants / "ben.jsonl", "adam": tenants / "anna.jsonl"}
    assert list(find_tenants(tenants)) == list(SIZES)
    (tmp_path / "empty").mkdir()
    for path, rule in ((tmp_path / "empty", "has none"), (tmp_path / "absent", "does not exist")):
        with pytest.raises(DataError, match=rule):
            find_tenants(path)
    for content, rule in (
        ("- a", "one line each"),
        ("tenants.json: a.jsonl", "not basis or tenants.json"),
        ("a/b: c.jsonl", "Rename"),
        ("Basis: c.jsonl", "not basis or tenants.json"),
        ("Anna: a.jsonl\nanna: b.jsonl", "b.jsonl is 'anna' and another is 'Anna'"),
        ("É: a.jsonl\né: b.jsonl", "a folder that no other has"),
        ("-rf: c.jsonl", "not '.' or '-' first"),
        ("7: a.jsonl", "Quote names such as '7'"),
        ("no: a.jsonl", "Quote names such as .* 'no'"),
    ):
        listed.write_text(content)
        with pytest.raises(ConfigError, match=rule):
            find_tenants(listed)
    both = tmp_path / "both"
    both.mkdir()
    for suffix in ("jsonl", "parquet"):
        (both / f"anna.{suffix}").touch()
    with pytest.raises(ConfigError, match="anna.parquet is 'anna' and another is 'anna'"):
        find_tenants(both)


def test_options_that_make_no_sense_for_tenants_are_refused(tenants: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'lora' trains others"):
        execute_many(config_of(tenants, method="lora"), tmp_path, no_progress)
    for option, given in (("report_to", ("tensorboard",)), ("save_steps", 3)):
        with pytest.raises(ConfigError, match=f"^--{option.replace('_', '-')} is for a run that trains alone"):
            execute_many(config_of(tenants, **{option: given}), tmp_path, no_progress)


def test_one_that_diverges_is_said_to_and_the_others_end(command, tenants: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def tune_many(*words: object) -> tuple[int, str, str]:
        few = ("--rank", "4", "--calibration-size", "16", "--accumulation", "2", "--device", "cpu")
        return command(
            "tune-many", "--model", "pocket", "--tenants", tenants, *few, "--output", tmp_path / "out", *words
        )

    status, out, _ = tune_many("--lr", str(DIVERGES), "--method", "random")
    assert status == 1
    for name in SIZES:
        failure = json.loads((tmp_path / "out" / name / "failure.json").read_text())
        assert failure["reason"] == "diverged"
        assert [path.name for path in (tmp_path / "out" / name).iterdir()] == ["failure.json"]
        assert f"{name}: Training diverged" in out
    assert isinstance(Failure.model_validate(failure), Failure)
    assert tune_many("--method", "random", "--lr", "0.01", "--resume")[0] == 0
    for name in SIZES:  # nothing of the failure stays beside the record
        assert {path.name for path in (tmp_path / "out" / name).iterdir()} == {"adapter", "result.json"}


def test_a_core_too_large_for_its_bits_diverged_and_stops_no_other_tenant(
    tenants: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frozencore.adapter.core.largest_level", lambda _: 0.0)
    outcomes = execute_many(config_of(tenants, method="random", bits=8), tmp_path, no_progress)
    assert list(outcomes) == list(SIZES)
    for failure in outcomes.values():
        assert isinstance(failure, Failure)
        assert failure.reason == "diverged"
        assert failure.message.startswith("Training diverged: A core of 8 bits has values of 0e+00 at most")


def test_a_dry_run_counts_the_rows_and_steps_that_are_then_recorded_and_shown_with_each_loss(  # type: ignore[no-untyped-def]
    command, tenants: Path, tmp_path: Path, monkeypatch
) -> None:
    few = ("--rank", "4", "--calibration-size", "16", "--batch-size", "2", "--accumulation", "2", "--device", "cpu")
    few += ("--select-checkpoint", "2", "--patience", "99")
    words = ("tune-many", "--model", "pocket", "--tenants", tenants, *few, "--slots", "2", "--out", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.delattr("frozencore.tune.many.tenant_rows.load")  # no weights are read
        status, out, err = command(*words, "--dry-run")
    assert (status, err, list(tmp_path.iterdir())) == (0, "", [])
    assert f"\ntenants: {tenants}\n" in out
    assert "How many is" in out.splitlines()[-1]
    status, shown, err = command(*words)
    assert (status, err) == (0, "")
    assert "3 tenants on one basis" in shown
    for name in SIZES:
        record = json.loads((tmp_path / "out" / name / "result.json").read_text())
        used, steps = record["rows"], record["training"]["num_steps"]
        assert f"{name}: {used['trained']} rows to train on (" in out
        assert f"), {used['scored']} to score; {steps} steps." in out
        assert f"{record['held_out_loss']:.3f}" in shown
    assert f"{record['num_trainable']:,} trained values each" in out
    assert "3 tenants on a basis of 16 rows, 2 at a time." in out
    assert command("tune-many", "--model", "pocket", "--out", tmp_path / "none")[0] == 2
    status, shown, err = command("tune-many", "--resume", "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    assert "3 of 3 tenants have their result" in shown


def test_a_run_that_is_told_to_stop_keeps_the_steps_of_its_tenants_and_goes_on_bit_equal(
    together: tuple[Path, dict[str, TenantOutcome]], tenants: Path, tmp_path: Path
) -> None:
    out, config = tmp_path / "cut", config_of(tenants, select_checkpoint="epoch")
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    def told(stage: str, done: int, *_: object) -> None:
        if stage == "train" and done >= 3 and not heard:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(TrainingError, match=r"told to stop; the steps of \d tenants? are saved\. Go on with"):
            execute_many(config, out, told, num_slots=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    kept = sorted(file.stem for file in (out / "unfinished").iterdir())
    assert kept
    assert not any((out / name / "result.json").exists() for name in kept)
    with pytest.raises(TrainingError, match=rf"kept the steps of {len(kept)} tenants?\. Go on .*tune-many --resume"):
        execute_many(config, out, no_progress, num_slots=2)
    with pytest.raises(ArtifactError, match=r"unfinished.*safetensors differs: .*epochs"):
        execute_many(
            config_of(tenants, select_checkpoint="epoch", epochs=3), out, no_progress, num_slots=2, resume=True
        )
    steps: list[int] = []
    execute_many(
        config, out, lambda stage, done, *_: steps.append(done) if stage == "train" else None, num_slots=2, resume=True
    )
    assert steps[0] > 3
    assert not (out / "unfinished").exists()
    for name in SIZES:
        found, wanted = (load_file(place / name / "adapter/adapter_model.safetensors") for place in (out, together[0]))
        assert same_tensors(found, wanted), name
        records = [json.loads((place / name / "result.json").read_text()) for place in (out, together[0])]
        assert records[0]["training"] == records[1]["training"]
        assert records[0]["selection"]["scores"] == records[1]["selection"]["scores"]


def test_a_tenant_whose_steps_cannot_be_kept_is_named_and_the_others_are_kept(
    tenants: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, failed = Unfinished.write, list[str]()

    def fail_once(one: Unfinished, file: Path, key: dict[str, Any]) -> None:
        if not failed:
            failed.append(file.stem)
            raise ArtifactError(f"{file} cannot be written: No space left on device.")
        write(one, file, key)

    monkeypatch.setattr(Unfinished, "write", fail_once)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(TrainingError, match="steps of 1 tenant are saved, but not those of .*No space") as end:
            execute_many(config_of(tenants), tmp_path, stopping_at(2), num_slots=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert f"not those of '{failed[0]}' (" in str(end.value)
    (kept,) = (tmp_path / "unfinished").iterdir()
    assert kept.stem != failed[0]


def test_a_damaged_file_of_an_unfinished_tenant_is_one_line(tenants: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "unfinished").mkdir(parents=True)
    (out / "unfinished/anna.safetensors").write_bytes(b"half")
    with pytest.raises(ArtifactError, match=r"anna.safetensors is damaged .*Remove it to train this tenant anew"):
        execute_many(config_of(tenants), out, no_progress, num_slots=2, resume=True)


def test_rows_that_any_tenant_is_scored_on_are_not_calibrated_on(tenants: Path, tmp_path: Path) -> None:
    every = tmp_path / "every.jsonl"
    every.write_text("".join((tenants / f"{name}.jsonl").read_text() for name in SIZES))
    config = config_of(tenants, calibration_data=str(every), calibration_size=1000, select_checkpoint="epoch")
    inputs, rows = read_tenants(*tenants_of(config), no_progress)
    unseen = {tuple(row.input_ids) for one in rows.values() for row in one.rows.scored_or_choosing}
    assert inputs.rows.calibration
    assert {tuple(row.input_ids) for row in inputs.rows.calibration}.isdisjoint(unseen)
    assert {one.config.rows.calibration_data for one in rows.values()} == {str(every)}  # stands in the records


def test_a_tenant_that_could_not_be_written_keeps_the_steps_that_it_had(
    tenants: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = config_of(tenants, select_checkpoint="epoch"), tmp_path / "out"
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(TrainingError, match="are saved"):
            execute_many(config, out, stopping_at(3), num_slots=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    kept = {file.name: file.read_bytes() for file in (out / "unfinished").iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr("frozencore.adapter.folders.save_file", fail)
        outcomes = execute_many(config, out, no_progress, num_slots=2, resume=True)
    assert {one.reason for one in outcomes.values() if isinstance(one, Failure)} == {"not written"}
    assert all("No space left" in one.message for one in outcomes.values() if isinstance(one, Failure))
    assert {file.name: file.read_bytes() for file in (out / "unfinished").iterdir()} == kept
    outcomes = execute_many(config, out, no_progress, num_slots=2, resume=True)
    assert not any(isinstance(one, Failure) for one in outcomes.values())
