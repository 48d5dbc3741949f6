"""Measure how well a saved basis fits the rows of a run: the share of their whitened moment that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peft import PeftModel

from frozencore.adapter.layer import frozen_core_layers
from frozencore.calibration.batches import Batch
from frozencore.calibration.collect import collect_moments
from frozencore.errors import CalibrationError
from frozencore.maths.basis import known_basis
from frozencore.maths.capture import CAPTURE_NEEDS, share_held
from frozencore.maths.groups import Share, mean_share
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.tune.rows import TokenRow
from frozencore.tune.run.adapt import on_named_basis
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.prepare import calibration_batches, prepare
from frozencore.tune.run.row_sets import RunRows
from frozencore.words import Progress, num_of

CHECKED_ROWS, CHECKED_LAYERS = 64, 16  # before training: one small pass, and few sums in memory
HALF = 0.5
GROWING = "No study has measured whether growing a basis lowers the loss."


@dataclass(frozen=True)
class RowShares:
    """The share of the rows' whitened moment that a basis holds, in each layer that their gradient reaches."""

    num_rows: int
    layers: dict[str, Share]

    @property
    def mean(self) -> Share:
        return mean_share(self.layers.values())

    def poor_fit(self, basis: str) -> str | None:
        """A warning, if the basis is nearer to a random basis than to the rows' own best one; None if it is not."""
        mean = self.mean
        if mean.way >= HALF:
            return None
        return (
            f"A basis should hold at least half of what a basis of the rows' own would, but of the whitened moment of "
            f"{num_of(self.num_rows, 'row')} {basis} holds {mean.held:.1%}, the best basis of its rank {mean.own:.1%} "
            f"and a random one {mean.random:.2%}. Widen it with `frozencore calibrate --grow`, or add the rows to the "
            f"--tenants that it is chosen for. {GROWING}"
        )


def collect_for(
    config: RunConfig,
    model: PeftModel,
    batches: list[Batch],
    needs: frozenset[MomentName],
    progress: Progress,
    *,
    names: Iterable[str] | None = None,
) -> dict[str, LayerMoments]:
    """Collect moments of the adapted layers, or of those named; the adapter is still zero."""
    layers = {name: layer.get_base_layer() for name, layer in frozen_core_layers(model, "default").items()}
    if names is not None:
        layers = {name: layers[name] for name in names}
    return collect_moments(
        model.get_base_model(),
        batches,
        layers,
        needs=needs,
        options=config.calibration_options,
        progress=progress,
    )


def shares_of_rows(config: RunConfig, progress: Progress) -> RowShares:
    """Collect the moments of the configured rows, once, and compare the configured basis with them.

    The rows are the calibration rows of a run with this configuration.

    Raises:
        ArtifactError: There is no such basis, or it belongs to another model.
        CalibrationError: The rows have no gradient in any layer of the basis.
    """
    config = on_named_basis(config)
    prepared = prepare(config, progress)
    model = config.method_entry.add(prepared.model, config.adapter_options(()))
    found = _shares(
        config, model, prepared.rows.calibration, prepared.encoder.pad_id, list(frozen_core_layers(model, "default")),
        progress,
    )  # fmt: skip
    if not found.layers:
        raise CalibrationError(
            "The gradient of these rows is zero in every layer, so no basis can be compared with it. Check their "
            "completions."
        )
    return found


def check_basis(
    config: RunConfig, model: PeftModel, rows: RunRows, pad_id: int, progress: Progress
) -> RowShares | None:
    """Compare the configured basis with at most 64 calibration rows, in at most 16 layers spread over the model.

    Returns:
        None without a saved basis, and for rows without a gradient.
    """
    if config.basis is None or not rows.calibration:
        return None
    names = list(frozen_core_layers(model, "default"))
    count = min(CHECKED_LAYERS, len(names))
    some = [names[i * len(names) // count] for i in range(count)]
    found = _shares(config, model, rows.calibration[:CHECKED_ROWS], pad_id, some, progress)
    return found if found.layers else None


def _shares(
    config: RunConfig, model: PeftModel, rows: Sequence[TokenRow], pad_id: int, names: list[str], progress: Progress
) -> RowShares:
    batches, layers = calibration_batches(rows, pad_id), frozen_core_layers(model, "default")
    moments = collect_for(config, model, batches, CAPTURE_NEEDS, progress, names=names)
    shares = {}
    for name in names:
        found = moments.pop(name)
        if bool(found.G.any()):
            P, Q, _ = layers[name].factors("default")
            shares[name] = share_held(found, known_basis(P.float(), Q.float()))
    return RowShares(len(rows), shares)
