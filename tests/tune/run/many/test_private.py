"""``tune-many`` with a privacy budget for each tenant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import ArtifactError, ConfigError
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.many.execute_many import execute_many
from frozencore.tune.run.many.finish import TenantOutcome
from frozencore.tune.run.prepare import prepare
from frozencore.tune.run.record import TunedRecord
from small_tenants import SIZES, config_of, silent

opacus = pytest.importorskip("opacus")


def private(data: Path, **overrides: Any) -> RunConfig:
    return config_of(data, **{"method": "random", "private_epsilon": 8.0, "private_delta": 1e-2, **overrides})


Together = tuple[Path, dict[str, TenantOutcome]]


def test_each_tenant_has_a_budget_of_its_own_and_its_record_tells_nothing_exact(
    tenants: Path, together: Together, tmp_path: Path
) -> None:
    outcomes = execute_many(private(tenants, method="fcca", basis=str(together[0] / "basis")), tmp_path / "out", silent)
    assert outcomes.keys() == SIZES.keys()
    for name, record in outcomes.items():
        assert isinstance(record, TunedRecord)
        assert record.private is not None
        assert record.private.num_rows == record.rows.trained
        assert 7.5 < record.private.spent <= 8
        assert record.training.content() == {"num_steps": record.private.num_steps}
        assert (record.basis_fit, record.criterion, record.warnings) == (None, None, ())
        assert {record.hashes.train, record.hashes.calibration} == {None}
        trained = prepare(config_of(tenants / f"{name}.jsonl"), silent).rows.fingerprints["train"]
        assert trained not in "".join(path.read_text() for path in (tmp_path / "out" / name).rglob("*.json"))
    assert len({json.dumps(record.content()["private"]) for record in outcomes.values()}) == len(SIZES)
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_basis_that_an_earlier_run_left_in_the_folder_is_not_that_of_a_private_run(
    tenants: Path, together: Together, tmp_path: Path
) -> None:
    """It may be calibrated on the private rows."""
    shutil.copytree(together[0] / "basis", tmp_path / "out" / "basis")
    with pytest.raises(ArtifactError, match="of an earlier run"):
        execute_many(private(tenants), tmp_path / "out", silent)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["basis"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fcca"}, "calibrates its bases on the private rows"),
        ({"select_checkpoint": "epoch"}, "--select-checkpoint chooses a step from the rows"),
        (
            {"private_delta": 0.1},
            "Tenant 'ben': The delta of private training must be below",
        ),
    ],
)
def test_what_leaks_is_refused_before_anything_is_written(
    options: dict[str, Any], message: str, tenants: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        execute_many(private(tenants, **options), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()
