"""How near the bases of few calibration examples are to those of many (paper, table "basis-stability")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from frozencore.adapter.bases.carried import get_bases
from frozencore.errors import ConfigError
from frozencore.maths.linalg import principal_cosines
from frozencore.tune.run.bench import Bench
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.record import RECORD_FORMAT, StabilityRecord
from frozencore.tune.run.record_parts import Provenance, RecordedConfig
from frozencore.tune.run.targets import resolve_targets
from frozencore.words import Progress
from frozencore_lab.campaign.shared import SharedWork


@dataclass(frozen=True)
class Calibrated:
    """A run as far as its bases: its configuration, and model and rows."""

    config: RunConfig
    bench: Bench


def compare_bases(
    run: Calibrated, reference: Calibrated, reference_size: int, shared: SharedWork, progress: Progress
) -> StabilityRecord:
    """Mean principal-angle cosines of P and of Q to the reference's, over directions and then over layers.

    Args:
        run, reference: On one model, with two sets of calibration rows.

    Raises:
        ConfigError: A rank budget, which may give the two other layers and ranks.
    """
    if run.config.rank_budget is not None:
        raise ConfigError("Bases are compared at one rank in every layer: give rank in place of rank_budget.")
    small, large = (_bases(one, shared, progress) for one in (run, reference))
    cosines: dict[str, dict[str, float]] = {side: {} for side in "PQ"}
    for name, basis in small.items():
        layer, _, side = name.rpartition(".")
        cosines[side][layer] = float(principal_cosines(basis, large[name]).mean())
    return StabilityRecord(
        format=RECORD_FORMAT,
        config=RecordedConfig.of(run.config),
        cosine_P=sum(cosines["P"].values()) / len(cosines["P"]),
        cosine_Q=sum(cosines["Q"].values()) / len(cosines["Q"]),
        layers=cosines,
        num_calibration={
            "basis": len(run.bench.rows.calibration),
            "reference": len(reference.bench.rows.calibration),
        },
        reference_size=reference_size,
        provenance=Provenance.here(),
    )


def _bases(run: Calibrated, shared: SharedWork, progress: Progress) -> dict[str, Tensor]:
    model, _ = shared.adapt(run.config, run.bench, resolve_targets(run.config, run.bench.model), progress)
    bases = get_bases(model)
    model.unload()
    return bases
