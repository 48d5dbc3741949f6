"""Sketches of the moments of the batches that a model trains on, where the sums themselves would take too much room.

The first step that is listened to tells the metric alone; sketches are of those after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from frozencore.calibration.gathering import SAME_BUDGET, SKETCH, Gathering, require_finite_sums
from frozencore.calibration.running_sketch import RunningSketch
from frozencore.calibration.sketch import CROSS, Sketch
from frozencore.errors import CalibrationError
from frozencore.maths.linalg import Shape, TruncatedSVD
from frozencore.maths.moments import DIAGONALS, LayerMoments
from frozencore.maths.whitening import Whitening
from frozencore.ranks import own_rank, sum_over_ranks


class SketchedGathering(Gathering):
    """As :class:`Gathering`, in 6k(m + n) bytes a layer instead of 4mn.

    Args:
        widths: By layer, the columns of its sketch.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        *,
        shapes: Mapping[str, Shape],
        widths: Mapping[str, int],
        whitening: Whitening,
    ) -> None:
        super().__init__(model, layers, DIAGONALS | CROSS)
        self.sketches = {name: RunningSketch(shapes[name], widths[name], whitening) for name in layers}
        for name, recorder in self.capture.recorders.items():
            recorder.sketch = self.sketches[name]
        if not whitening.needs():
            self.set_metric()

    @property
    def awaits_metric(self) -> bool:
        return any(sketch.tests is None for sketch in self.sketches.values())

    def set_metric(self) -> None:
        """Sketch in the metric of what was seen so far, by all processes."""
        for name, recorder in self.capture.recorders.items():
            totals = {what: sum_over_ranks(total.clone()) for what, total in recorder.totals.items()}
            count = int(sum_over_ranks(torch.tensor(recorder.num_tokens)))
            self.sketches[name].begin(LayerMoments(max(1, count), **totals), self._device(name))

    def turn(self, ranks: Mapping[str, int], share: float) -> Iterator[tuple[str, Sketch]]:
        """Layer by layer, what was found in the sums of all processes; each goes on from that share of them.

        Args:
            ranks: By layer, how many singular triples are wanted.

        Raises:
            CalibrationError: A sum is not finite; the layer is named.
        """
        for name, recorder in self.capture.recorders.items():
            sketch = self.sketches[name]
            assert sketch.images is not None
            sketch.images = sum_over_ranks(sketch.images[0]), sum_over_ranks(sketch.images[1])
            totals = {what: sum_over_ranks(total) for what, total in recorder.totals.items()}
            require_finite_sums(name, totals)
            require_finite_sums(name, {"cross": sketch.images[0], "cross, transposed": sketch.images[1]})
            count = int(sum_over_ranks(torch.tensor(recorder.num_tokens)))
            diagonals = LayerMoments(count, **totals)
            U, S, V = sketch.turn(diagonals, ranks[name], share)
            yield name, Sketch(diagonals, TruncatedSVD(U, S / count, V))
            keeps = share if own_rank() == 0 else 0.0
            recorder.num_tokens = round(count * keeps)
            recorder.totals = {what: total * keeps for what, total in totals.items()}
            if not keeps:
                for image in sketch.images:
                    image.zero_()

    def state(self) -> dict[str, Tensor]:
        own = super().state()
        for name, sketch in self.sketches.items():
            own |= {f"{name}{SKETCH}{what}": tensor for what, tensor in sketch.state().items()}
        return own

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        of_sketches: dict[str, dict[str, Tensor]] = {name: {} for name in self.sketches}
        others: dict[str, Tensor] = {}
        for key, tensor in state.items():
            if key.endswith("|cross"):
                raise CalibrationError(
                    f"Sketches are gathered here, but the saved moments are exact sums. {SAME_BUDGET}"
                )
            name, is_of_sketch, what = key.partition(SKETCH)
            if is_of_sketch and name in of_sketches:
                of_sketches[name][what] = tensor.to(self._device(name))
            else:
                others[key] = tensor
        super().load_state(others)
        for name, sketch in self.sketches.items():
            sketch.load_state(of_sketches[name])

    def _device(self, name: str) -> torch.device:
        return next(self.taps.layers[name].parameters()).device
