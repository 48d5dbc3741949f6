"""The inputs and output errors of layers, summed while the model runs (paper, Algorithm 1; docs/method.md).

An identity autograd function is added to the layer's output. Its forward saves the input x; its backward receives the
output error δ and adds ``δᵀx``, ``Σ x²``, ``Σ δ²``. Each call is counted once, with or without gradient checkpointing
and for any storage of the weights. The cost is one extra product.

Frozen :class:`Taps` describe a pass. While the pass runs, a :class:`CalibrationPass` knows the current batch and
backward pass and tells each layer's recorder what to add. A recorder knows only its own sums, in float32 or wider.

Shapes: a call's counted tokens N, m out features, n in features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.counted_tokens import CountedTokens, EncoderSide, RowOrders
from frozencore.device import find_device
from frozencore.errors import CalibrationError
from frozencore.maths.moments import BACKWARD_MOMENTS, LayerMoments, MomentName

HALF = (torch.bfloat16, torch.float16)
BLOCKS = 4  # of rows of a product on the CPU, one at a time
MANY = 128  # tokens; the product of fewer takes less time in float32


def select(values: Float[Tensor, "all p"], rows: Tensor | None) -> Float[Tensor, "N p"]:
    """Select the counted rows; None selects all."""
    return values if rows is None else values.index_select(0, rows.to(values.device))


def sum_dtype(values: Tensor) -> torch.dtype:
    """The dtype in which values are summed: a bfloat16 sum of 1000 ones is 256."""
    return torch.promote_types(values.dtype, torch.float32)


def square_sum(values: Float[Tensor, "N p"]) -> Float[Tensor, " p"]:
    """``Σ v⊙v`` over rows; values become float32 first, because a product in half precision would be rounded."""
    wide = values.to(sum_dtype(values))
    return torch.linalg.vecdot(wide, wide, dim=0)


def outer(left: Float[Tensor, "N p"], right: Float[Tensor, "N q"]) -> Float[Tensor, "p q"]:
    """``leftᵀ right`` with float32 accumulation."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype in HALF:
        return torch.mm(left.mT, right, out_dtype=torch.float32)
    total = torch.zeros(left.shape[1], right.shape[1], dtype=sum_dtype(left), device=left.device)
    add_outer(total, left, right)
    return total


def add_outer(total: Float[Tensor, "p q"], left: Float[Tensor, "N p"], right: Float[Tensor, "N q"]) -> None:
    """``total += leftᵀ right`` in place."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype in HALF:
        torch.addmm(total, left.mT, right, out_dtype=torch.float32, out=total)
        return
    of_bfloat16 = left.dtype == right.dtype == torch.bfloat16 and left.device.type == "cpu"
    splits = of_bfloat16 and len(left) >= MANY and _splits()
    if left is right or splits:
        _add_blocks(total, left, right, splits=splits)
    else:
        total.addmm_(left.mT.to(total.dtype), right.to(total.dtype))


def _add_blocks(
    total: Float[Tensor, "p q"], left: Float[Tensor, "N p"], right: Float[Tensor, "N q"], *, splits: bool
) -> None:
    """``total += leftᵀ right``, of a matrix with itself in five eighths of the products: the rest is a copy.

    Args:
        splits: Multiply bfloat16 values twice: the product, rounded, and what rounding took from it.
    """
    is_gram, width = left is right, -(-len(total) // BLOCKS)
    if not splits:
        left, right = left.to(total.dtype), right.to(total.dtype)
    for first in range(0, len(total), width):
        end, start = first + width, first if is_gram else 0
        rows, columns = left[:, first:end].mT, right[:, start:]
        product = rows @ columns
        for part in (product, torch.addmm(product, rows, columns, beta=-1)) if splits else (product,):
            total[first:end, start:] += part
            if is_gram:
                total[end:, first:end] += part[:, width:].mT


@cache
def _splits() -> bool:
    """Whether this CPU multiplies bfloat16 fast, and sums products and what is added to them in float32."""
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return False
    values = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, exact = torch.zeros(64, 64), values.double().mT @ values.double()
    _add_blocks(found, values, values.clone(), splits=True)
    return float((found - exact).abs().max()) < 1e-4 * float(exact.abs().max())


def finite(values: Tensor) -> Bool[Tensor, ""]:
    """Return whether the sum of the values is finite, as a tensor on their device."""
    return values.sum(dtype=sum_dtype(values)).isfinite()


LossFn = Callable[[nn.Module, Any], Tensor]
"""``loss_fn(model, batch)``: one number with a gradient, the mean over the batch's examples."""
INPUT_SIDE: frozenset[MomentName] = frozenset({"input_square", "input_outer", "input_total"})
STRIP = 2**24  # entries of a product that are moved to another device at a time
SIDES = (("input", "input_finite", 0), ("output error", "error_finite", -1))
"""Each side, its flag, and the index of the layer where NaN started: bad inputs spread from the first layer, bad output
errors from the last."""
OUTPUT_SIDE: frozenset[MomentName] = frozenset({"output_outer", "output_total"})


@dataclass(frozen=True)
class ReadInput:
    """The input side of one call, kept for the next layer that reads the same tensor (q, k, v).

    Attributes:
        x: Kept alive, because its address identifies it.
        values: The counted rows of x.
        finite: Whether the values are finite.
    """

    x: Tensor
    values: Float[Tensor, "N n"]
    sums: dict[MomentName, Tensor]
    finite: Tensor

    @classmethod
    def of(cls, x: Tensor, rows: Tensor | None, needs: frozenset[MomentName]) -> ReadInput:
        values = select(x.reshape(-1, x.shape[-1]), rows)
        sums: dict[MomentName, Tensor] = {}
        if "input_square" in needs:
            sums["input_square"] = square_sum(values)
        if "input_outer" in needs:
            sums["input_outer"] = outer(values, values)
        if "input_total" in needs:
            sums["input_total"] = values.sum(0, dtype=sum_dtype(values))
        return cls(x, values, sums, finite(values))

    def is_of(self, x: Tensor) -> bool:
        mine = self.x
        same_place = mine.data_ptr() == x.data_ptr() and mine.shape == x.shape and mine.stride() == x.stride()
        return same_place and mine._version == x._version


class LayerRecorder:
    """The sums of one layer, and whether all values since :meth:`forget_flags` were finite.

    Attributes:
        input_finite, error_finite: None if there were no calls.
    """

    def __init__(self, name: str, stats_device: torch.device | None) -> None:
        self.name = name
        self.num_tokens = 0
        self.totals: dict[MomentName, Tensor] = {}
        self.input_finite: Tensor | None = None
        self.error_finite: Tensor | None = None
        self._stats_device = stats_device

    def add_input(self, read: ReadInput) -> None:
        """Count the tokens of an input and add it to the sums."""
        self.input_finite = read.finite if self.input_finite is None else self.input_finite & read.finite
        self.num_tokens += len(read.values)
        for name, value in read.sums.items():
            self._add(name, value)

    def add_error(
        self, error: Float[Tensor, "N m"], values: Float[Tensor, "N n"], needs: frozenset[MomentName]
    ) -> None:
        """Add output errors; ``values`` are the inputs of the same tokens, for the cross moment."""
        is_finite = finite(error)
        self.error_finite = is_finite if self.error_finite is None else self.error_finite & is_finite
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
            self._add("output_total", output.sum(0, dtype=sum_dtype(output)))

    def forget_flags(self) -> None:
        self.input_finite = self.error_finite = None

    def moments(self) -> LayerMoments:
        """Hand over the sums; the recorder keeps no reference to them."""
        totals, self.totals = self.totals, {}
        return LayerMoments(num_tokens=self.num_tokens, **totals)

    def _add(self, name: MomentName, value: Tensor) -> None:
        value = value.to(self._stats_device or value.device)
        if name in self.totals:
            self.totals[name].add_(value)
        else:
            self.totals[name] = value.clone() if name in INPUT_SIDE else value

    def _add_product(self, name: MomentName, left: Tensor, right: Tensor) -> None:
        """Add ``leftᵀ right`` (p x q, from N x p and N x q) without a p x q matrix beside the sum."""
        device = self._stats_device or left.device
        if name not in self.totals:
            shape = left.shape[1], right.shape[1]
            self.totals[name] = torch.zeros(shape, dtype=sum_dtype(left), device=device)
        total = self.totals[name]
        if device == left.device:
            add_outer(total, left, right)
            return
        rows = max(1, STRIP // total.shape[1])  # in strips, because the model's device may have little memory left
        for strip, part in zip(total.split(rows), left.split(rows, dim=1), strict=True):
            strip.add_(outer(part, right).to(device))


@dataclass
class FiniteBatches:
    """Check batch by batch whether the layers saw finite values.

    Flags on a GPU are read after the pass, because each read synchronises the device.

    Attributes:
        waiting: Flags to read: the batch, one of ``SIDES``, the layers, and a flag for each layer.
    """

    waiting: list[tuple[int, tuple[str, str, int], list[str], Tensor]] = field(default_factory=list)

    def add(self, batch: int, recorders: Mapping[str, LayerRecorder]) -> None:
        """Add the flags of a batch.

        Raises:
            CalibrationError: The flags are on the CPU, and a value was not finite.
        """
        for side in SIDES:
            found = {name: getattr(recorder, side[1]) for name, recorder in recorders.items()}
            flags = {name: flag for name, flag in found.items() if flag is not None}
            if not flags:
                continue
            device = next((flag.device for flag in flags.values() if flag.device.type != "cpu"), torch.device("cpu"))
            stacked = torch.stack([flag.to(device, non_blocking=True) for flag in flags.values()])
            self.waiting.append((batch, side, list(flags), stacked))
            if device.type == "cpu":
                self.look()

    def look(self) -> None:
        """Read the waiting flags.

        Raises:
            CalibrationError: A batch was not finite; the message names the first one.
        """
        while self.waiting:
            batch, (side, _, first_met), names, flags = self.waiting.pop(0)
            bad = [name for name, fine in zip(names, flags.tolist(), strict=True) if not fine]
            if bad:
                raise CalibrationError(
                    f"NaN or Inf in the {side} of layer {bad[first_met]!r} in calibration batch {batch} ({len(bad)} of "
                    f"{len(names)} layers). Check the model's weights and that batch; float16 models often need "
                    "bfloat16."
                )


@dataclass(frozen=True)
class Taps:
    """The layers of one pass, and the sums to collect."""

    layers: Mapping[str, nn.Module]
    needs: frozenset[MomentName]
    options: CalibrationOptions = field(default_factory=CalibrationOptions)
    loss_fn: LossFn | None = None

    @property
    def read_errors(self) -> bool:
        """Whether a batch takes a backward pass after its forward pass."""
        return self.options.tokens == "nonzero_delta" or not self.needs.isdisjoint(BACKWARD_MOMENTS)


class _Tap(torch.autograd.Function):
    """Identity on y. ``anchor`` is a scalar that requires a gradient, so the backward pass reaches every layer.

    y is marked as changed in place: a model may then go on and change it in place, and the error is that of y before.
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
        tokens, source_tokens: The counted tokens of the current batch, and the encoder's if the model has one.
        finite_batches: Whether the batches were finite; to be looked at after the pass.
    """

    def __init__(self, taps: Taps, encoder: EncoderSide | None) -> None:
        self.taps = taps
        self.encoder = encoder
        device = find_device(taps.options.stats_device) if taps.options.stats_device else None
        self.recorders = {name: LayerRecorder(name, device) for name in taps.layers}
        self.tokens = self.source_tokens = CountedTokens(None, None)
        self.orders = RowOrders()
        self.finite_batches = FiniteBatches()
        self._latest: ReadInput | None = None

    def tokens_of(self, layer: nn.Module, x: Tensor) -> CountedTokens:
        """The counted tokens of the side that a call reads, the encoder's or the other."""
        reads_source = self.encoder is not None and self.encoder.reads_source(layer, x)
        return self.source_tokens if reads_source else self.tokens

    def rows_of(self, name: str, x: Tensor, tokens: CountedTokens) -> CountedTokens:
        """The counted rows of a layer's input.

        Raises:
            CalibrationError: It is not known which token each row belongs to.
        """
        num_rows = x.numel() // x.shape[-1]
        if tokens.rows is None and (tokens.or_all or num_rows == tokens.num_rows):  # every row counts, in any order
            return tokens
        order = self.orders.of(name, x, tokens) if not tokens.or_all or num_rows == tokens.num_rows else "no tokens"
        if order == "examples first":
            return tokens
        if order == "tokens first":
            return tokens.tokens_first()
        if order == "no tokens":
            return replace(tokens, rows=None)
        raise CalibrationError(
            f"Layer {name!r} saw {num_rows} rows where the batch has {tokens.num_rows} tokens, "
            f"{'in an unknown order, ' if num_rows == tokens.num_rows else ''}so padding cannot be told from text. "
            "Routed experts and pooled layers cannot be calibrated; leave them out of target_modules."
        )

    def record(
        self,
        recorder: LayerRecorder,
        tokens: CountedTokens,
        x: Tensor,
        delta: Tensor | None = None,
        y: Tensor | None = None,
    ) -> None:
        """Add one call: input x (..., n), output error (..., m) and, if asked, output y (..., m).

        Args:
            tokens: The counted rows of x.
        """
        needs, rows = self.taps.needs, tokens.rows
        error = None if delta is None else delta.reshape(-1, delta.shape[-1])
        if tokens.only_nonzero_delta and error is not None:
            nonzero = error.ne(0).any(1)
            rows = nonzero.nonzero().squeeze(1) if rows is None else rows[nonzero[rows]]
        if self._latest is None or tokens.only_nonzero_delta or not self._latest.is_of(x):
            self._latest = ReadInput.of(x, rows, needs)
        read = self._latest
        recorder.add_input(read)
        if y is not None:
            recorder.add_output(select(y.reshape(-1, y.shape[-1]), rows), needs)
        if error is not None:
            recorder.add_error(select(error, rows), read.values, needs)

    def finish_batch(self, batch_index: int) -> None:
        """Release the batch's tensors and keep its finite flags; flags on a GPU are read after the pass."""
        self._latest = None
        self.orders.forget()
        if self.encoder is not None:
            self.encoder.forget()
        self.finite_batches.add(batch_index, self.recorders)
        for recorder in self.recorders.values():
            recorder.forget_flags()


@contextmanager
def capturing(taps: Taps, encoder: EncoderSide | None = None) -> Iterator[CalibrationPass]:
    """Record the tapped layers of a model while it runs; the hooks are always removed afterwards."""
    capture = CalibrationPass(taps, encoder)
    handles: list[RemovableHandle] = []
    anchors: dict[torch.device, Tensor] = {}
    keeps_output = not taps.needs.isdisjoint(OUTPUT_SIDE)

    def tap(
        recorder: LayerRecorder, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
    ) -> Tensor | None:
        x = args[0] if args else next(iter(kwargs.values()))
        tokens = capture.tokens_of(layer, x)
        if capture.orders.looks:
            capture.orders.see(recorder.name, x, tokens)
            return None
        record = partial(capture.record, recorder, capture.rows_of(recorder.name, x, tokens))
        if not taps.read_errors:
            record(x.detach(), y=y.detach() if keeps_output else None)
            return None
        anchor = anchors.setdefault(y.device, torch.zeros((), device=y.device, requires_grad=True))
        y = y.clone() if y._is_view() else y  # autograd forbids changes of some views
        return _Tap.apply(y, x.detach(), anchor, record, keeps_output)

    try:
        for name, layer in taps.layers.items():
            hook = partial(tap, capture.recorders[name])
            handles.append(layer.register_forward_hook(hook, with_kwargs=True))
        yield capture
    finally:
        for handle in handles:
            handle.remove()
