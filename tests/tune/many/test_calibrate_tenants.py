"""One basis for many tenants: a plain calibration on rows of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import get_peft_model

from frozencore import FrozenCoreConfig, calibrate, load_basis
from frozencore.adapter.layer import frozen_core_layers
from frozencore.errors import ArtifactError
from frozencore.tune.adapt import calibration_batches
from frozencore.tune.calibrate_only import execute_calibration
from frozencore.tune.many.run import TenantOutcome
from small_tenants import SIZES, config_of, inputs_of, silent

SIZE = 10
"""More rows than anna has to train on, and fewer than the others have."""


def test_the_basis_is_a_plain_calibration_on_the_rows_that_a_run_of_each_tenant_would_calibrate_on(
    tenants: Path, tmp_path: Path
) -> None:
    config = config_of(tenants, calibration_size=SIZE)
    execute_calibration(config, tmp_path / "out", silent, of_tenants=True)
    alone = [inputs_of(config_of(tenants / f"{name}.jsonl", calibration_size=SIZE)) for name in SIZES]
    sizes = [len(one.rows.calibration) for one in alone]
    assert sizes[0] < SIZE
    assert sizes[1:] == [SIZE, SIZE]
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
