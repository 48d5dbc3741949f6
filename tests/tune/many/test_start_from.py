"""``--start-from``: training starts from the mean of cores on the run's basis, in ``tune`` and in ``tune-many``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frozencore import load_basis
from frozencore.adapter.mean_core import mean_core
from frozencore.adapter.saved.tensors import hash_tensors, vector_of
from frozencore.cli.run_screen import of_start
from frozencore.errors import ArtifactError, ConfigError, FrozenCoreError
from frozencore.tune.adapt import shares_of_start
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.many.run import TenantOutcome, execute_many
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run import execute, recipe_of
from frozencore.tune.training.train import train
from small_runs import SIZES, adapter_in, config_of, cores_in, difference, inputs_of, silent
from tiny import set_values

Together = tuple[Path, dict[str, TenantOutcome]]


def on_basis(data: Path, together: Together, **options: Any) -> RunConfig:
    few = {"model": str(pocket_model_path()), "batch_size": 2, "accumulation": 2, "epochs": 2, "device": "cpu"}
    return make_config(data=data, basis=str(together[0] / "basis"), **{**few, **options})


def mean_of(place: Path, together: Together) -> torch.Tensor:
    basis = load_basis(together[0] / "basis")
    size = sum(own.P.shape[1] ** 2 for own in basis.layers.values())
    return vector_of(mean_core(place, basis.identity, size))


def flat_of(folder: Path) -> torch.Tensor:
    return vector_of(load_file(folder / "adapter" / "adapter_model.safetensors"))


def test_what_a_killed_run_left_is_in_no_mean(together: Together, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(together[0], out)
    shutil.copytree(out / "ben", out / ".ben.407c589a.tmp")
    shutil.copytree(out / "ben", out / "dora")
    (out / "dora/inputs.json").write_text("{}")  # it ends with the run
    assert list(shares_of_start(out)) == list(SIZES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7: 3\n'7': 1", "reads one of its names as 7"),
        ("no: 1", "as False"),
        ("anna: 3\nanna/adapter: 1", "comes twice"),
    ],
)
def test_names_of_weights_that_are_no_text_or_come_twice_are_refused(
    text: str, message: str, together: Together, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(together[0], out)
    shutil.copytree(out / "anna", out / "7")
    (out / "w.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        mean_of(out / "w.yaml", together)


def test_very_large_and_very_small_weights_have_their_shares(together: Together, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(together[0], out)
    (out / "w.yaml").write_text("anna: 3\nben: 1")
    wanted = mean_of(out / "w.yaml", together)
    for unit in (1e307, 5e-324):
        (out / "w.yaml").write_text(f"anna: {3 * unit!r}\nben: {unit!r}")
        assert shares_of_start(out / "w.yaml") == {"anna": 0.75, "ben": 0.25}
        torch.testing.assert_close(mean_of(out / "w.yaml", together), wanted)


def test_tenants_of_one_name_in_two_folders_are_told_apart(together: Together, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        shutil.copytree(together[0] / "anna", tmp_path / folder / "anna")
    (tmp_path / "w.yaml").write_text("a/anna: 3\nb/anna: 1")
    assert shares_of_start(tmp_path / "w.yaml") == {"a/anna": 0.75, "b/anna": 0.25}


def test_a_configuration_that_was_changed_is_no_start(together: Together, tmp_path: Path) -> None:
    shutil.copytree(together[0] / "anna", tmp_path / "anna")
    file = tmp_path / "anna/adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alpha": 999}))
    with pytest.raises(ArtifactError, match="checksum differs"):
        mean_of(tmp_path / "anna", together)


def test_the_mean_of_a_folder_is_that_of_its_tenants_and_one_core_is_itself(together: Together, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(together[0], out)
    (out / "dora").mkdir()
    (out / "dora" / "failure.json").write_text("{}")  # it has no core
    flats = [flat_of(out / name) for name in SIZES]
    assert torch.equal(mean_of(out, together), torch.stack(flats).double().mean(0).float())
    for place in (out / "anna", out / "anna" / "adapter"):
        assert torch.equal(mean_of(place, together), flats[0])
    for file, text in (("w.yaml", "anna: 3\ncleo: 1\nben: 0"), ("w.json", '{"anna": 0.75, "cleo": 0.25}')):
        (out / file).write_text(text)
        assert shares_of_start(out / file) == {"anna": 0.75, "cleo": 0.25}
        assert torch.equal(mean_of(out / file, together), (0.75 * flats[0].double() + 0.25 * flats[2].double()).float())


def test_a_run_starts_from_the_core_and_a_tenant_of_many_as_a_run_alone(
    tenants: Path, together: Together, tmp_path: Path
) -> None:
    """Against the training of the loaded adapter, whose first steps have its loss."""
    start = str(together[0] / "ben")
    config = on_basis(tenants / "cleo.jsonl", together, start_from=start)
    record = execute(config, tmp_path / "run", silent)
    inputs = inputs_of(config)
    recipe = recipe_of(config.training, config.method.entry, inputs.rows, inputs.model)
    recipe = replace(recipe, learning_rate=record.resolved.recipe["learning_rate"])  # measured on the rows
    model = adapter_in(together[0] / "ben", is_trainable=True)
    report = train(model, inputs.rows.train, recipe, pad_id=inputs.encoder.pad_id)
    assert record.training.losses == pytest.approx(report.training.losses, rel=1e-5)
    zero = execute(on_basis(tenants / "cleo.jsonl", together), tmp_path / "zero", silent)
    assert record.training.losses[0] != pytest.approx(zero.training.losses[0], rel=1e-2)
    assert record.held_out_loss_before == zero.held_out_loss_before  # of the base model
    assert record.config.content()["start_from"] == start
    assert record.resolved.started_from == {"ben": 1.0}
    assert list(of_start(record)) == ["The start: ben (100%)."]
    many = execute_many(on_basis(tenants, together, start_from=start), tmp_path / "many", silent)["cleo"]
    assert many.training.losses == pytest.approx(record.training.losses, rel=1e-5)
    assert (many.hashes.start, many.resolved) == (record.hashes.start, record.resolved)
    assert zero.hashes.start is None
    assert difference(cores_in(tmp_path / "many" / "cleo"), cores_in(tmp_path / "run")) < 1e-5


def test_tenants_that_started_elsewhere_are_not_kept(tenants: Path, together: Together, tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(f"anna: {tenants}/anna.jsonl\n")
    starts = [str(together[0] / "ben"), str(together[0] / "cleo"), None]

    def train_from(start: str | None) -> None:
        execute_many(
            on_basis(tmp_path / "tenants.yaml", together, start_from=start), tmp_path / "out", silent, resume=True
        )

    train_from(starts[0])
    train_from(starts[0])
    for start in starts[1:]:
        with pytest.raises(ArtifactError, match="hash of start"):
            train_from(start)


def _other_basis(out: Path) -> Path:
    set_values(out / "anna" / "adapter", basis_id="0" * 64)
    return out


def _changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Path]:
    def put(out: Path) -> Path:
        file = out / "anna" / "adapter" / "adapter_model.safetensors"
        tensors = {key: change(flat) for key, flat in load_file(file).items()}
        save_file(tensors, file)
        set_values(file.parent, tensors_sha256=hash_tensors(tensors))
        return out

    return put


def _written(text: str) -> Callable[[Path], Path]:
    def put(out: Path) -> Path:
        (out / "weights.yaml").write_text(text)
        return out / "weights.yaml"

    return put


@pytest.mark.parametrize(
    ("put", "kind", "rule"),
    [
        (_other_basis, ArtifactError, "anna.adapter is on 000000000000"),
        (_changed(lambda flat: flat[:-1].clone()), ArtifactError, "are 256 numbers|numbers, but"),
        (_changed(lambda flat: flat * torch.nan), ArtifactError, "NaN or Inf"),
        (lambda out: out / "none", ArtifactError, "holds no adapter"),
        (lambda out: out / "basis", ArtifactError, "holds no adapter"),
        (_written("dora: 1"), ArtifactError, "dora holds no adapter"),
        (_written("basis: 1"), ArtifactError, "holds a basis"),
        (_written("anna: .nan"), ConfigError, "numbers of at least 0"),
        (_written("anna: -1"), ConfigError, "numbers of at least 0"),
        (_written("anna: 0"), ConfigError, "not all of them 0"),
        (_written("- anna"), ConfigError, "a weight for each tenant"),
    ],
)
def test_what_is_no_mean_on_the_basis_is_refused_in_a_line_before_anything_is_written(
    tenants: Path, together: Together, tmp_path: Path, put: Callable[[Path], Path], kind: type, rule: str
) -> None:
    shutil.copytree(together[0], tmp_path / "shop")
    config = on_basis(tenants / "anna.jsonl", together, start_from=str(put(tmp_path / "shop")))
    with pytest.raises(kind, match=rule):
        execute(config, tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_is_no_core_on_a_named_basis_is_refused(
    tenants: Path, together: Together, tmp_path: Path
) -> None:
    for method, held in (("lora", "a LORA adapter"), ("random", "P and Q of its own")):
        execute(config_of(tenants / "anna.jsonl", method=method), tmp_path / method, silent)
        config = on_basis(tenants / "anna.jsonl", together, start_from=str(tmp_path / method))
        with pytest.raises(FrozenCoreError, match=held):
            execute(config, tmp_path / "out", silent)
    with pytest.raises(ConfigError, match="name that basis with --basis"):
        config_of(tenants, start_from=str(together[0]))
