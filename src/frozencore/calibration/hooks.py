"""The inputs and output errors of layers, summed while the model runs (paper, Algorithm 1; docs/method.md).

An identity autograd function is added to the layer's output. Its forward saves the input x; its backward receives the
output error δ and adds ``δᵀx``, ``Σ x²``, ``Σ δ²``. Each call is counted once, with or without gradient checkpointing
and for any storage of the weights. The cost is one extra product.

Frozen :class:`PassSpec` describe a pass. While the pass runs, a :class:`CalibrationPass` knows the current batch and
passes the values to each layer's recorder, which adds them to its sums in float32 or wider.

Shapes: a call's counted tokens N, m out features, n in features; b examples of t tokens in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from frozencore.attributes import with_attributes
from frozencore.calibration.axes import find_seq_first_layers
from frozencore.calibration.batches import CountedTokens
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.device import find_device, without_autocast
from frozencore.errors import CalibrationError
from frozencore.maths.moments import (
    BACKWARD_MOMENTS,
    LayerMoments,
    MomentName,
    accumulation_dtype,
    add_outer,
    outer,
    square_sum,
)

LossFn = Callable[[nn.Module, Any], Tensor]
"""``loss_fn(model, batch)``: one number with a gradient, the mean over the batch's examples."""
STRIP = 2**24  # entries of a product that are moved to another device at a time
NEGLIGIBLE = 1e-6  # of the largest error: kernels round the error of a query with one key to 0 or to almost 0
OUTPUT_SIDE: frozenset[MomentName] = frozenset({"output_outer", "output_total"})


def select(values: Float[Tensor, "all p"], rows: Tensor | None) -> Float[Tensor, "N p"]:
    """Select the counted rows; None selects all."""
    return values if rows is None else values.index_select(0, rows.to(values.device))


def has_gradient(error: Float[Tensor, "N m"]) -> Tensor:
    """The rows whose output error is more than the rounding of the others; all if none has an error."""
    size = error.abs().amax(1)
    return ~(size < NEGLIGIBLE * size.max()) if len(size) else size.bool()  # NaN and Inf count, and are refused later


class InputStatistics:
    """The input side of one call, kept for the next layer that reads the same tensor (q, k, v).

    Attributes:
        values: The counted rows of the input, N x n.
        total: The sum of all values, which is finite only if they are.
        sums: The moments of the input alone.
    """

    def __init__(self, x: Tensor, rows: Tensor | None, needs: frozenset[MomentName]) -> None:
        self._x = x  # kept alive, because its address identifies it
        self._version = x._version  # which counts on when the tensor is changed in place
        self.values = values = select(x.reshape(-1, x.shape[-1]), rows)
        self.total = values.sum(dtype=accumulation_dtype(values))
        self.sums: dict[MomentName, Tensor] = {}
        if "input_square" in needs:
            self.sums["input_square"] = square_sum(values)
        if "input_outer" in needs:
            self.sums["input_outer"] = outer(values, values)
        if "input_total" in needs:
            self.sums["input_total"] = values.sum(0, dtype=accumulation_dtype(values))

    def is_of(self, x: Tensor) -> bool:
        mine = self._x
        same_place = mine.data_ptr() == x.data_ptr() and mine.shape == x.shape and mine.stride() == x.stride()
        return same_place and self._version == x._version


class LayerRecorder:
    """The sums of one layer, and by side the sum of all values since the last batch, finite only if they all are."""

    def __init__(self, name: str, stats_device: torch.device | None) -> None:
        self.name = name
        self.num_tokens = 0
        self.totals: dict[MomentName, Tensor] = {}
        self.seen: dict[str, Tensor] = {}
        self._stats_device = stats_device

    def add_input(self, read: InputStatistics) -> None:
        """Count the tokens of an input and add its sums."""
        self._see("input", read.total)
        self.num_tokens += len(read.values)
        for name, value in read.sums.items():
            self._add(name, value, shared=True)

    def add_error(
        self, error: Float[Tensor, "N m"], values: Float[Tensor, "N n"], needs: frozenset[MomentName]
    ) -> None:
        """Add output errors; ``values`` are the inputs of the same tokens, for the cross moment."""
        self._see("output error", error.sum(dtype=accumulation_dtype(error)))
        if "cross" in needs:
            self._add_product("cross", error, values)
        if "error_square" in needs:
            self._add("error_square", square_sum(error))
        if "error_outer" in needs:
            self._add_product("error_outer", error, error)

    def add_output(self, output: Float[Tensor, "N m"], needs: frozenset[MomentName]) -> None:
        if "output_outer" in needs:
            self._add_product("output_outer", output, output)
        if "output_total" in needs:
            self._add("output_total", output.sum(0, dtype=accumulation_dtype(output)))

    def moments(self) -> LayerMoments:
        """Hand over the sums; the recorder keeps no reference to them."""
        totals, self.totals = self.totals, {}
        return LayerMoments(num_tokens=self.num_tokens, **totals)

    def _see(self, side: str, total: Tensor) -> None:
        self.seen[side] = self.seen[side] + total if side in self.seen else total

    def _add(self, name: MomentName, value: Tensor, *, shared: bool = False) -> None:
        """Add a value; a ``shared`` one belongs to other layers too."""
        value = value.to(self._stats_device or value.device)
        if name in self.totals:
            self.totals[name].add_(value)
        else:
            self.totals[name] = value.clone() if shared else value

    def _add_product(self, name: MomentName, left: Tensor, right: Tensor) -> None:
        """Add ``leftᵀ right`` (p x q, from N x p and N x q) without a p x q matrix beside the sum."""
        device = self._stats_device or left.device
        if name not in self.totals:
            shape = left.shape[1], right.shape[1]
            self.totals[name] = torch.zeros(shape, dtype=accumulation_dtype(left), device=device)
        total = self.totals[name]
        if device == left.device:
            add_outer(total, left, right)
            return
        rows = max(1, STRIP // total.shape[1])  # in strips, because the model's device may have little memory left
        for strip, part in zip(total.split(rows), left.split(rows, dim=1), strict=True):
            strip.add_(outer(part, right).to(device))


class FiniteBatches:
    """Check batch by batch whether the layers saw finite values.

    Flags on a GPU are read after the pass, because each read synchronises the device.

    Attributes:
        waiting: Flags to read: the batch, the side, the layers, and a flag for each layer.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[int, str, list[str], Tensor]] = []

    def add(self, batch: int, recorders: Mapping[str, LayerRecorder]) -> None:
        """Add the flags of a batch, and forget the sums in the recorders.

        Raises:
            CalibrationError: The flags are on the CPU, and a value was not finite.
        """
        for side in ("input", "output error"):
            totals = {name: one.seen.pop(side) for name, one in recorders.items() if side in one.seen}
            if not totals:
                continue
            devices = (total.device for total in totals.values())
            device = next((one for one in devices if one.type != "cpu"), torch.device("cpu"))
            stacked = torch.stack([total.to(device, non_blocking=True) for total in totals.values()])
            self.waiting.append((batch, side, list(totals), stacked.isfinite()))
            if device.type == "cpu":
                self.look()

    def look(self) -> None:
        """Read the waiting flags.

        Raises:
            CalibrationError: A batch was not finite; the message names the first one.
        """
        while self.waiting:
            batch, side, names, flags = self.waiting.pop(0)
            bad = [name for name, fine in zip(names, flags.tolist(), strict=True) if not fine]
            if bad:
                # bad inputs spread from the first layer on, bad output errors from the last one back
                raise CalibrationError(
                    f"NaN or Inf in the {side} of layer {bad[0 if side == 'input' else -1]!r} in calibration batch "
                    f"{batch} ({len(bad)} of {len(names)} layers). Check the model's weights and that batch; float16 "
                    "models often need bfloat16."
                )


@dataclass(frozen=True)
class PassSpec:
    """The layers of one pass, and the sums to collect."""

    layers: Mapping[str, nn.Module]
    needs: frozenset[MomentName]
    options: CalibrationOptions = field(default_factory=CalibrationOptions)
    loss_fn: LossFn | None = None


class _Recorded(torch.autograd.Function):
    """Identity on y. ``anchor`` is a scalar that requires a gradient, so the backward pass reaches every layer.

    y is marked as changed in place: a model may then change it in place too, and the error is that of y before that.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, record: Callable[..., None], keeps_output: bool
    ) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(x, *([y.clone()] if keeps_output else []))
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (delta,) = grad_outputs
        x, *output = ctx.saved_tensors
        ctx.record(x, delta, *output)
        return (delta if ctx.needs_input_grad[0] else None), None, None, None, None


class CalibrationPass:
    """The state of a running pass.

    Attributes:
        tokens: The counted tokens of the current batch; None counts the rows with a gradient other than zero.
        seq_first_layers: The layers that read tokens before rows; None until a batch needs it (:meth:`find_order`).
        is_off: Nothing is recorded.
        finite_batches: To be looked at after the pass.
    """

    def __init__(self, spec: PassSpec) -> None:
        self.spec = spec
        device = find_device(spec.options.stats_device) if spec.options.stats_device else None
        self.recorders = {name: LayerRecorder(name, device) for name in spec.layers}
        self.tokens: CountedTokens | None = None
        self.finite_batches = FiniteBatches()
        self.seq_first_layers: set[str] | None = None
        self.is_off = False
        self._latest: InputStatistics | None = None

    @property
    def reads_errors(self) -> bool:
        """Whether the batch takes a backward pass after its forward pass."""
        reads = self.tokens is None or self.spec.options.tokens == "nonzero_delta"
        return reads or not self.spec.needs.isdisjoint(BACKWARD_MOMENTS)

    def find_order(self, model: Any) -> None:
        """Find the layers that read tokens first, before the first padded batch that has as many rows as tokens."""
        tokens = self.tokens
        is_square = tokens is not None and tokens.rows is not None and tokens.shape[0] == tokens.shape[1]
        if is_square and self.seq_first_layers is None:
            with with_attributes(self, is_off=True):
                self.seq_first_layers = find_seq_first_layers(model, self.spec.layers)

    def rows_of(self, name: str, x: Tensor) -> Tensor | None:
        """The counted rows of a layer's input, whose first axis is the batch (b x t x n, or b·t x n); None means all.

        Raises:
            CalibrationError: The input has other rows, so padding cannot be distinguished from text.
        """
        if self.tokens is None:
            return None
        shape, num_rows, rows = tuple(x.shape[:-1]), x.numel() // x.shape[-1], self.tokens.rows
        axes = tuple(length for length in shape if length > 1)
        in_order = axes in (self.tokens.shape, (self.tokens.num_rows,)) or 1 in self.tokens.shape
        in_order = in_order and name not in (self.seq_first_layers or ())
        if num_rows == self.tokens.num_rows and (rows is None or in_order):
            return rows
        raise CalibrationError(
            f"Layer {name!r} read rows of shape {shape} where the batch has {' x '.join(map(str, self.tokens.shape))} "
            "tokens, so padding cannot be told from text. Leave layers such as routed experts, pooled ones, those of "
            "images and those that read tokens first out of target_modules; or count the rows that the loss reaches: "
            "calibrate(..., loss_fn=lambda model, batch: model(**batch).loss)."
        )

    @without_autocast()
    def record(
        self,
        recorder: LayerRecorder,
        rows: Tensor | None,
        x: Tensor,
        delta: Tensor | None = None,
        y: Tensor | None = None,
    ) -> None:
        """Add the counted rows of a call: input x (..., n), output error and, if asked, output y (..., m)."""
        needs = self.spec.needs
        error = None if delta is None else delta.reshape(-1, delta.shape[-1])
        only_nonzero_delta = self.tokens is None or self.spec.options.tokens == "nonzero_delta"
        if only_nonzero_delta and error is not None:
            nonzero = has_gradient(error)
            rows = nonzero.nonzero().squeeze(1) if rows is None else (here := rows.to(error.device))[nonzero[here]]
        read = self._latest  # which the backward threads of other GPUs replace
        if read is None or only_nonzero_delta or not read.is_of(x):
            read = InputStatistics(x, rows, needs)
            self._latest = read
        recorder.add_input(read)
        if y is not None:
            recorder.add_output(select(y.reshape(-1, y.shape[-1]), rows), needs)
        if error is not None:
            recorder.add_error(select(error, rows), read.values, needs)

    def finish_batch(self, batch_index: int) -> None:
        """Release the batch's tensors and keep its finite flags; flags on a GPU are read after the pass."""
        self._latest = None
        self.finite_batches.add(batch_index, self.recorders)


@contextmanager
def recording(spec: PassSpec) -> Iterator[CalibrationPass]:
    """Record the layers of a model while it runs; the hooks are always removed afterwards."""
    running = CalibrationPass(spec)
    handles: list[RemovableHandle] = []
    anchors: dict[torch.device, Tensor] = {}
    keeps_output = not spec.needs.isdisjoint(OUTPUT_SIDE)

    def record(
        recorder: LayerRecorder, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
    ) -> Tensor | None:
        if running.is_off:
            return None
        x = args[0] if args else next(iter(kwargs.values()))
        add = partial(running.record, recorder, running.rows_of(recorder.name, x))
        if not running.reads_errors:
            add(x.detach(), y=y.detach() if keeps_output else None)
            return None
        anchor = anchors.setdefault(y.device, torch.zeros((), device=y.device, requires_grad=True))
        y = y.clone() if y._is_view() else y  # autograd forbids changes of some views
        return _Recorded.apply(y, x.detach(), anchor, add, keeps_output)

    try:
        for name, layer in spec.layers.items():
            hook = partial(record, running.recorders[name])
            handles.append(layer.register_forward_hook(hook, with_kwargs=True))
        yield running
    finally:
        for handle in handles:
            handle.remove()
