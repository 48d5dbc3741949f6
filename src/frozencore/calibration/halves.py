"""Calibration data in two halves, and the directions of one half in the sketches of the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from frozencore.calibration.batches import Batch, mapped, num_examples_of, require_batch
from frozencore.calibration.options import CalibrationOptions
from frozencore.calibration.preserve import preserved
from frozencore.calibration.recorder import Projection
from frozencore.calibration.run_pass import run_pass
from frozencore.calibration.sketch import CROSS, Sketch
from frozencore.calibration.taps import Taps
from frozencore.errors import CalibrationError
from frozencore.maths.whitening import Whitening
from frozencore.ranks import all_ranks_or_none, sum_over_ranks
from frozencore.words import Progress


def in_halves(batches: Iterable[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Every other batch; of a single batch, every other row.

    Raises:
        CalibrationError: There is one example.
        DataError: The data are not batches.
    """
    held = list(batches)
    for index, batch in enumerate(held):
        require_batch(batch, index, any_form=True)
    if len(held) > 1:
        return held[::2], held[1::2]
    num_rows = num_examples_of(held[0]) if held else 0
    if num_rows < 2:
        raise CalibrationError(
            "A rank budget is spent on what two halves of the calibration examples agree on, but there is "
            f"{num_rows or 'no'} example here. Give more."
        )
    return [_rows(held[0], 0)], [_rows(held[0], 1)]


def crossed(
    model: nn.Module,
    batches: Iterable[Batch],
    layers: Mapping[str, nn.Module],
    directions: Mapping[str, Sketch],
    own: Mapping[str, Sketch],
    *,
    whitening: Whitening,
    options: CalibrationOptions,
    progress: Progress | None = None,
) -> dict[str, Float[Tensor, "k k"]]:
    """``Uᵀ T V`` by layer, in one pass over the batches that T is of; in a process group, on every rank.

    Args:
        directions: Sketches of other batches, whose U and V are meant.
        own: Sketches of these batches, whose second moments T is whitened by.
    """
    projections = {
        name: _projection(directions[name], own[name], whitening) if len(own[name].svd.S) else None for name in layers
    }
    with all_ranks_or_none(), preserved(model):
        m_n = {name: (len(sketch.svd.U), len(sketch.svd.V)) for name, sketch in own.items()}
        nothing = {name: Projection(left=torch.zeros(m, 1), right=torch.zeros(n, 1)) for name, (m, n) in m_n.items()}
        taps = Taps(layers, CROSS, options, {name: found or nothing[name] for name, found in projections.items()})
        recorders = run_pass(model, batches, taps, progress)
    return {
        name: sum_over_ranks(recorder.totals["cross"]) / own[name].diagonals.num_tokens
        for name, recorder in recorders.items()
    }


def _projection(directions: Sketch, own: Sketch, whitening: Whitening) -> Projection:
    U, _, V = directions.svd
    D_root, A_root = whitening.output_root(own.diagonals), whitening.input_root(own.diagonals)
    return Projection(left=D_root(U), right=A_root(V))


def _rows(batch: Batch, first: int) -> Batch:
    rows: Batch = mapped(batch, lambda tensor: tensor[first::2] if tensor.ndim else tensor)
    return rows
