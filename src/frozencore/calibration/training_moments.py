"""Sum moments of the training batches during training, without extra passes.

Sketches replace sums that would be too large. The taps of a calibration pass stay on the layers while the trainer runs
its own forward and backward passes, also under gradient checkpointing and accumulation. A pass without gradients, such
as an evaluation, adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.calibration.collect import count_tokens
from frozencore.calibration.counted_tokens import watching_encoder
from frozencore.calibration.running_sketch import RunningSketch
from frozencore.calibration.sketch import Sketch
from frozencore.calibration.taps import Taps, capturing
from frozencore.errors import CalibrationError
from frozencore.maths.linalg import Shape, TruncatedSVD, all_finite
from frozencore.maths.moments import CROSS, DIAGONALS, LayerMoments, MomentName
from frozencore.maths.whitening import Whitening
from frozencore.ranks import own_rank, sum_over_ranks

SKETCH = "|sketch "  # stands between a layer's name and a sketch tensor's name in a file
SAME_BUDGET = "Resume with the memory_budget (--refresh-memory) that the checkpoint was made with."


class TrainingMoments:
    """Exact sums of layers over the training batches since the last round, plus a share of the earlier sums.

    Args:
        model: Called with ``input_ids``, and ``attention_mask`` where there is padding, by name.
        layers: The layers to sum, under any names.
        needs: The moments to sum.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], needs: frozenset[MomentName]) -> None:
        self.taps = Taps(layers, needs, checks=False)  # checks take a fifth of the time; sums show NaN too
        with ExitStack() as undo:
            encoder = undo.enter_context(watching_encoder(model))
            self.capture = undo.enter_context(capturing(self.taps, encoder))
            handle = model.register_forward_pre_hook(self._begin_batch, with_kwargs=True)
            undo.callback(handle.remove)
            self._undo = undo.pop_all()

    def listen(self, *, on: bool) -> None:
        """Turn summing on or off; it is on at first."""
        self.capture.listens = on

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._undo.close()

    def moments(self) -> dict[str, LayerMoments]:
        """The sums so far, not copied.

        Raises:
            CalibrationError: A sum is not finite; the message names the layer.
        """
        for name, recorder in self.capture.recorders.items():
            require_finite_sums(name, recorder.totals)
        return {
            name: LayerMoments(num_tokens=recorder.num_tokens, **recorder.totals)
            for name, recorder in self.capture.recorders.items()
        }

    def keep(self, share: float, sums: Mapping[str, LayerMoments]) -> None:
        """Continue from ``share`` of these sums; the tensors are overwritten.

        Args:
            sums: The sums over all processes, of the layers that this process owns. Other layers start at zero.
        """
        for name, recorder in self.capture.recorders.items():
            kept = sums.get(name, LayerMoments(0))
            recorder.num_tokens = round(kept.num_tokens * share)
            recorder.totals = {what: kept.total(what).mul_(share) for what in kept.names()}

    def state(self) -> dict[str, Tensor]:
        """The sums by name, for saving."""
        state: dict[str, Tensor] = {}
        for name, recorder in self.capture.recorders.items():
            state[f"{name}|num_tokens"] = torch.tensor(recorder.num_tokens)
            state |= {f"{name}|{what}": total for what, total in recorder.totals.items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore sums that :meth:`state` returned.

        Raises:
            CalibrationError: They belong to other layers, or are sketches.
        """
        if any(SKETCH in key for key in state):
            raise CalibrationError(f"Exact sums are gathered here, but the saved moments are sketches. {SAME_BUDGET}")
        sums: dict[str, dict[Any, Tensor]] = {}
        for key, value in state.items():
            name, _, what = key.rpartition("|")
            sums.setdefault(name, {})[what] = value
        if sums.keys() != self.capture.recorders.keys():
            odd = sorted(sums.keys() ^ self.capture.recorders.keys())
            raise CalibrationError(
                f"Saved moments are of the layers that train, but {odd[0]!r} ({len(odd)} in all) is on one side only. "
                "Resume with the adapter that the checkpoint was made with."
            )
        for name, recorder in self.capture.recorders.items():
            recorder.num_tokens = int(sums[name].pop("num_tokens"))
            recorder.totals = {what: total.to(self._device(name)) for what, total in sums[name].items()}

    def _device(self, name: str) -> torch.device:
        return next(self.taps.layers[name].parameters()).device

    def _begin_batch(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.capture.forget_batch()
        if self.capture.listens and torch.is_grad_enabled():
            count_tokens(kwargs, self.capture)


class SketchedMoments(TrainingMoments):
    """Sketches instead of the exact sums of :class:`TrainingMoments`: 6k(m + n) bytes a layer instead of 4mn.

    Args:
        widths: The number of sketch columns k, by layer.
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
        """Set the sketches' metric from the second moments so far, over all processes."""
        for name, recorder in self.capture.recorders.items():
            totals = {what: sum_over_ranks(total.clone()) for what, total in recorder.totals.items()}
            count = int(sum_over_ranks(torch.tensor(recorder.num_tokens)))
            self.sketches[name].begin(LayerMoments(max(1, count), **totals), self._device(name))

    def next_round(self, ranks: Mapping[str, int], share: float) -> Iterator[tuple[str, Sketch]]:
        """Yield each layer's result from the sums of all processes; the layer continues from ``share`` of its sums.

        Args:
            ranks: The number of singular triples to find, by layer.

        Raises:
            CalibrationError: A sum is not finite; the message names the layer.
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
            U, S, V = sketch.next_round(diagonals, ranks[name], share)
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


def require_finite_sums(layer: str, sums: Mapping[Any, Tensor]) -> None:
    """Check a layer's sums for NaN and Inf; nothing else checks them.

    Raises:
        CalibrationError: A sum is not finite; the message names moment and layer.
    """
    for what, total in sums.items():
        if not all_finite(total):
            raise CalibrationError(
                f"The moment {what!r} of layer {layer!r} met NaN or Inf while training. Lower the learning rate; "
                "float16 training often needs bfloat16."
            )
