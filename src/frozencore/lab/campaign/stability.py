"""How near the bases of few calibration examples are to those of many (paper, table "basis-stability")."""

from __future__ import annotations

from torch import Tensor

from frozencore.adapter.bases.carried import get_bases
from frozencore.lab.campaign.shared import SharedWork, replace_size
from frozencore.lab.run.bench import Bench, Stages
from frozencore.lab.run.config import RunConfig
from frozencore.lab.run.record import RECORD_FORMAT, Provenance, RecordedConfig, StabilityRecord
from frozencore.lab.run.targets import resolve_targets
from frozencore.maths.linalg import principal_cosines


def compare_bases(
    config: RunConfig, bench: Bench, reference: Bench, reference_size: int, shared: SharedWork, stages: Stages
) -> StabilityRecord:
    """Mean principal-angle cosines of P and of Q to the reference's, over directions and then over layers.

    Args:
        bench, reference: One model with two sets of calibration rows.
    """
    small = _bases(config, bench, shared, stages)
    large = _bases(replace_size(config, reference_size), reference, shared, stages)
    cosines: dict[str, dict[str, float]] = {side: {} for side in "PQ"}
    for name, basis in small.items():
        layer, _, side = name.rpartition(".")
        cosines[side][layer] = float(principal_cosines(basis, large[name]).mean())
    return StabilityRecord(
        format=RECORD_FORMAT,
        config=RecordedConfig.of(config),
        cosine_P=sum(cosines["P"].values()) / len(cosines["P"]),
        cosine_Q=sum(cosines["Q"].values()) / len(cosines["Q"]),
        layers=cosines,
        num_calibration={"basis": len(bench.rows.calibration), "reference": len(reference.rows.calibration)},
        reference_size=reference_size,
        provenance=Provenance.here(),
    )


def _bases(config: RunConfig, bench: Bench, shared: SharedWork, stages: Stages) -> dict[str, Tensor]:
    model, _ = shared.adapt(config, bench, resolve_targets(config, bench.model), stages)
    bases = get_bases(model)
    model.unload()
    return bases
