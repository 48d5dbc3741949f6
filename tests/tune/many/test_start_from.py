"""``--start-from``: training starts from a core on the run's basis, in ``tune`` and in ``tune-many``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frozencore.cli.run_screen import of_start
from frozencore.errors import ArtifactError, ConfigError
from frozencore.progress import no_progress
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.many.finisher import TenantOutcome
from frozencore.tune.many.run import execute_many
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run import execute, recipe_of
from frozencore.tune.training.train import train
from small_runs import adapter_in, config_of, cores_in, difference, inputs_of

Together = tuple[Path, dict[str, TenantOutcome]]


def on_basis(data: Path, together: Together, **options: Any) -> RunConfig:
    few = {"model": str(pocket_model_path()), "batch_size": 2, "accumulation": 2, "epochs": 2, "device": "cpu"}
    return make_config(data=data, basis=str(together[0] / "basis"), **{**few, **options})


def test_a_run_starts_from_the_core_and_a_tenant_of_many_as_a_run_alone(
    tenants: Path, together: Together, tmp_path: Path
) -> None:
    """Against the training of the loaded adapter, whose first steps have its loss."""
    start = str(together[0] / "ben")
    config = on_basis(tenants / "cleo.jsonl", together, start_from=start)
    record = execute(config, tmp_path / "run", no_progress)
    inputs = inputs_of(config)
    recipe = recipe_of(config.training, config.method.entry, inputs.rows, inputs.model)
    recipe = replace(recipe, learning_rate=record.resolved.recipe["learning_rate"])  # measured on the rows
    model = adapter_in(together[0] / "ben", is_trainable=True)
    report = train(model, inputs.rows.train, recipe, pad_id=inputs.encoder.pad_id)
    assert record.training.losses == pytest.approx(report.training.losses, rel=1e-5)
    zero = execute(on_basis(tenants / "cleo.jsonl", together), tmp_path / "zero", no_progress)
    assert record.training.losses[0] != pytest.approx(zero.training.losses[0], rel=1e-2)
    assert record.held_out_loss_before == zero.held_out_loss_before  # of the base model
    assert record.config.content()["start_from"] == start
    assert record.resolved.started_from == start
    assert list(of_start(record)) == [f"The start: {start}."]
    many = execute_many(on_basis(tenants, together, start_from=start), tmp_path / "many", no_progress)["cleo"]
    assert many.training.losses == pytest.approx(record.training.losses, rel=1e-5)
    assert (many.hashes.start, many.resolved) == (record.hashes.start, record.resolved)
    assert zero.hashes.start is None
    assert difference(cores_in(tmp_path / "many" / "cleo"), cores_in(tmp_path / "run")) < 1e-5


def test_tenants_that_started_elsewhere_are_not_kept(tenants: Path, together: Together, tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(f"anna: {tenants}/anna.jsonl\n")
    starts = [str(together[0] / "ben"), str(together[0] / "cleo"), None]

    def train_from(start: str | None) -> None:
        execute_many(
            on_basis(tmp_path / "tenants.yaml", together, start_from=start), tmp_path / "out", no_progress, resume=True
        )

    train_from(starts[0])
    train_from(starts[0])
    for start in starts[1:]:
        with pytest.raises(ArtifactError, match="hash of start"):
            train_from(start)


def _renamed(out: Path) -> Path:
    file = out / "anna" / "adapter" / "adapter_model.safetensors"
    save_file({f"frozencore_core_{'0' * 32}": values for values in load_file(file).values()}, file)
    return out / "anna"


def _changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Path]:
    def put(out: Path) -> Path:
        file = out / "anna" / "adapter" / "adapter_model.safetensors"
        save_file({key: change(values) for key, values in load_file(file).items()}, file)
        return out / "anna"

    return put


@pytest.mark.parametrize(
    ("put", "rule"),
    [
        (_renamed, f"has a core on the basis {'0' * 32}, but the model has [0-9a-f]{{32}}"),
        (_changed(lambda values: values * torch.nan), "NaN or Inf"),
        (lambda out: out / "none", "none does not exist"),
        (lambda out: out, "has no adapter_config.json"),
        (lambda out: out / "basis", "has no adapter_model.safetensors"),
    ],
)
def test_what_is_no_core_on_the_basis_is_refused_in_a_line_before_anything_is_written(
    tenants: Path, together: Together, tmp_path: Path, put: Callable[[Path], Path], rule: str
) -> None:
    shutil.copytree(together[0], tmp_path / "shop")
    config = on_basis(tenants / "anna.jsonl", together, start_from=str(put(tmp_path / "shop")))
    with pytest.raises(ArtifactError, match=rule):
        execute(config, tmp_path / "out", no_progress)
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_another_basis_is_no_start(tenants: Path, together: Together, tmp_path: Path) -> None:
    for method, rule in (("lora", "has no frozen core"), ("random", "has a core on the basis")):
        execute(config_of(tenants / "anna.jsonl", method=method), tmp_path / method, no_progress)
        config = on_basis(tenants / "anna.jsonl", together, start_from=str(tmp_path / method))
        with pytest.raises(ArtifactError, match=rule):
            execute(config, tmp_path / "out", no_progress)
    with pytest.raises(ConfigError, match="name that basis with --basis"):
        config_of(tenants, start_from=str(together[0]))
