"""What a saved basis holds of rows that it may not have been chosen for."""

from __future__ import annotations

from dataclasses import dataclass

from frozencore.adapter.layer import frozen_core_layers
from frozencore.errors import CalibrationError
from frozencore.maths.basis import known_basis
from frozencore.maths.capture import CAPTURE_NEEDS, share_held
from frozencore.maths.groups import Share, mean_share
from frozencore.tune.run.adapt import on_named_basis
from frozencore.tune.run.bench import calibration_batches, prepare
from frozencore.tune.run.calibrate import collect_for
from frozencore.tune.run.config import RunConfig
from frozencore.words import Progress


@dataclass(frozen=True)
class Held:
    """The share of the rows' whitened moment that a basis holds, in each layer that their gradient reaches."""

    num_rows: int
    layers: dict[str, Share]

    @property
    def mean(self) -> Share:
        return mean_share(self.layers.values())


def held_of_rows(config: RunConfig, progress: Progress) -> Held:
    """Collect the moments of the configured rows, once, and compare the configured basis with them.

    The rows are those that a run of this configuration would calibrate on.

    Raises:
        ArtifactError: There is no such basis, or it is of another model.
        CalibrationError: The rows have no gradient in any layer of the basis.
    """
    config = on_named_basis(config)
    bench = prepare(config, progress)
    model = config.method_entry.add(bench.model, config.adapter_options(()))
    batches = calibration_batches(bench.rows, bench.encoder.pad_id)
    moments = collect_for(config, model, batches, CAPTURE_NEEDS, progress)
    shares = {}
    for name, layer in frozen_core_layers(model, "default").items():
        found = moments.pop(name)
        if bool(found.G.any()):
            P, Q, _ = layer.factors("default")
            shares[name] = share_held(found, known_basis(P.float(), Q.float()))
    if not shares:
        raise CalibrationError(
            "A basis holds a share of a gradient, but these rows have none. Check their completions."
        )
    return Held(len(bench.rows.calibration), shares)
