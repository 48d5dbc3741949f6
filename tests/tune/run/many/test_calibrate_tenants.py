"""One basis for many tenants, from rows of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import get_peft_model

from frozencore import FrozenCoreConfig, calibrate, load_basis
from frozencore.adapter.layer import frozen_core_layers
from frozencore.errors import ArtifactError
from frozencore.tune.run.calibrate_only import execute_calibration_of_groups
from frozencore.tune.run.prepare import calibration_batches, prepare
from small_tenants import SIZES, config_of, silent


def test_each_tenant_is_a_group_of_the_rows_that_a_run_of_it_alone_would_calibrate_on(
    tenants: Path, tmp_path: Path
) -> None:
    config = config_of(tenants)
    found = execute_calibration_of_groups(config, tmp_path / "out", silent)
    groups, sizes = {}, []
    for name in SIZES:
        prepared = prepare(config_of(tenants / f"{name}.jsonl"), silent)
        groups[name] = calibration_batches(prepared.rows.calibration, prepared.encoder.pad_id)
        sizes.append(len(prepared.rows.calibration))
    model = get_peft_model(prepared.model, FrozenCoreConfig(r=4, task_type="CAUSAL_LM"))
    alone = calibrate(model, groups=groups, options=config.calibration_options, progress=False)
    saved = load_basis(tmp_path / "out" / "basis")
    for name, layer in frozen_core_layers(model, "default").items():
        assert all(torch.equal(X, Y) for X, Y in zip(saved.layers[name], layer.factors("default")[:2], strict=True))
    assert found.shares == alone.shares
    assert sizes[0] < 16 == max(sizes)
    assert str(saved.calibrated_on).startswith(f"3 groups of {min(sizes)} to 16 rows, ")
    with pytest.raises(ArtifactError, match="already holds a calibration"):
        execute_calibration_of_groups(config, tmp_path / "out", silent)
