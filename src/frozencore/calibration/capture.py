"""Capture: what flows through a layer, summed while the model runs (paper, Algorithm 1; docs/maths.md).

An identity autograd function sits on the layer's output. Its forward saves the input x, its backward receives the
output error δ and adds ``δᵀx``, ``Σ x²``, ``Σ δ²``. That counts each call once with and without gradient
checkpointing, is indifferent to how the weights are stored, and costs one extra product.

Products are added where the sum lies (``addmm``), so no second m x n matrix exists.

Shapes: a batch's counted tokens N, m out features, n in features, k columns of a projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from frozencore.calibration.encoder_side import EncoderSide
from frozencore.calibration.sums import add_outer, finite, outer, projected, select, square_sum, sum_dtype
from frozencore.errors import CalibrationError
from frozencore.maths.moments import BACKWARD_MOMENTS, LayerMoments, MomentName

INPUT_SIDE: frozenset[MomentName] = frozenset({"input_square", "input_outer", "input_total"})
STRIP = 2**24  # entries of a product that are moved at once to sums on another device


class _Tap(torch.autograd.Function):
    """Identity on y. ``anchor`` is a scalar with requires_grad: it starts the graph at layers without grad inputs."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, recorder: LayerRecorder, tokens: CountedTokens
    ) -> Tensor:
        ctx.recorder, ctx.tokens = recorder, tokens
        ctx.save_for_backward(x, *([y] if recorder.reads_output else []))
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (delta,) = grad_outputs
        x, *output = ctx.saved_tensors
        ctx.recorder.record(x, delta, output[0] if output else None, ctx.tokens)
        return (delta if ctx.needs_input_grad[0] else None), None, None, None, None


@dataclass
class CountedTokens:
    """Which rows of the flattened (batch x time) activations count in a batch."""

    num_rows: int
    rows: Tensor | None
    only_nonzero_delta: bool = False

    @classmethod
    def from_mask(cls, mask: Tensor, *, only_nonzero_delta: bool = False) -> CountedTokens:
        flat = mask.flatten()
        rows = None if bool(flat.all()) else flat.nonzero().squeeze(1)
        return cls(num_rows=flat.numel(), rows=rows, only_nonzero_delta=only_nonzero_delta)


@dataclass(frozen=True)
class ReadInput:
    """What one call added on the input side, kept for the next layer that reads the same tensor (q, k, v)."""

    x: Tensor  # held so that its memory is not reused: only then does its address identify it
    values: Tensor  # its counted rows
    sums: dict[MomentName, Tensor]
    finite: Tensor

    def is_of(self, x: Tensor) -> bool:
        mine = self.x
        same_place = mine.data_ptr() == x.data_ptr() and mine.shape == x.shape and mine.stride() == x.stride()
        return same_place and mine._version == x._version


@dataclass(frozen=True)
class Projection:
    """What δ (by ``left``, m x k) and x (by ``right``, n x k) are multiplied with before their cross product is summed:
    ``leftᵀ (Σ δxᵀ) right``, without the m x n matrix in the middle. None is the identity."""

    left: Tensor | None = None
    right: Tensor | None = None


class LayerRecorder:
    """Float32 sums of one layer over everything it saw."""

    def __init__(self, name: str, capture: Capture, projection: Projection) -> None:
        self.name = name
        self.capture = capture
        self.projection = projection
        self.num_tokens = 0
        self.totals: dict[MomentName, Tensor] = {}
        self.input_finite: Tensor | None = None
        self.error_finite: Tensor | None = None

    @property
    def reads_output(self) -> bool:
        return not self.capture.needs.isdisjoint({"output_outer", "output_total"})

    def record(self, x: Tensor, delta: Tensor | None, y: Tensor | None, tokens: CountedTokens) -> None:
        """Add one call: input x (..., n), output error (..., m) and, if asked, output y (..., m)."""
        needs = self.capture.needs
        x_all = x.reshape(-1, x.shape[-1])
        if x_all.shape[0] != tokens.num_rows:
            raise CalibrationError(
                f"Layer {self.name!r} saw {x_all.shape[0]} rows where the batch has {tokens.num_rows} tokens, so "
                "padding cannot be told from text. Routed experts and pooled layers cannot be calibrated; "
                "leave them out of target_modules."
            )
        rows = tokens.rows
        error = None if delta is None else delta.reshape(-1, delta.shape[-1])
        if tokens.only_nonzero_delta and error is not None:
            nonzero = error.ne(0).any(1)
            rows = nonzero.nonzero().squeeze(1) if rows is None else rows[nonzero[rows]]
        read = self.capture.read_input(x, rows)
        self.input_finite = read.finite if self.input_finite is None else self.input_finite & read.finite
        for name, value in read.sums.items():
            self._add(name, value)
        self.num_tokens += x_all.shape[0] if rows is None else rows.numel()
        if error is not None:
            error = select(error, rows)
            is_finite = finite(error)
            self.error_finite = is_finite if self.error_finite is None else self.error_finite & is_finite
            if "cross" in needs:
                self._add_product(
                    "cross", projected(error, self.projection.left), projected(read.values, self.projection.right)
                )
            if "error_square" in needs:
                self._add("error_square", square_sum(error))
            if "error_outer" in needs:
                self._add_product("error_outer", error, error)
        if y is not None:
            output = select(y.reshape(-1, y.shape[-1]), rows)
            if "output_outer" in needs:
                self._add_product("output_outer", output, output)
            if "output_total" in needs:
                self._add("output_total", output.sum(0, dtype=sum_dtype(output)))

    def _add(self, name: MomentName, value: Tensor) -> None:
        value = value.to(self.capture.stats_device or value.device)
        if name in self.totals:
            self.totals[name].add_(value)
        else:
            self.totals[name] = value.clone() if name in INPUT_SIDE else value

    def _add_product(self, name: MomentName, left: Tensor, right: Tensor) -> None:
        """Add ``leftᵀ right`` (p x q, from N x p and N x q) without a p x q matrix beside the sum."""
        device = self.capture.stats_device or left.device
        if name not in self.totals:
            shape = left.shape[1], right.shape[1]
            self.totals[name] = torch.zeros(shape, dtype=sum_dtype(left), device=device)
        total = self.totals[name]
        if device == left.device:
            add_outer(total, left, right)
            return
        rows = max(1, STRIP // total.shape[1])  # strips: the device that the model runs on may have little room left
        for strip, part in zip(total.split(rows), left.split(rows, dim=1), strict=True):
            strip.add_(outer(part, right).to(device))

    def moments(self) -> LayerMoments:
        """The sums, handed over: recorders refer to each other, so what they kept would outlive its last use."""
        totals, self.totals = self.totals, {}
        return LayerMoments(num_tokens=self.num_tokens, **totals)


class Capture:
    """The recorders of one pass over a group of layers.

    ``tokens`` are those of the current batch, ``source_tokens`` the encoder's where a model has one.
    """

    def __init__(
        self, needs: frozenset[MomentName], stats_device: torch.device | None, encoder: EncoderSide | None
    ) -> None:
        self.needs = needs
        self.stats_device = stats_device
        self.encoder = encoder
        self.tokens = self.source_tokens = CountedTokens(0, None)
        self.layers: list[nn.Module] = []
        self.recorders: dict[str, LayerRecorder] = {}
        self._latest: ReadInput | None = None

    @property
    def needs_backward(self) -> bool:
        return not self.needs.isdisjoint(BACKWARD_MOMENTS) or self.tokens.only_nonzero_delta

    def tokens_of(self, layer: nn.Module, x: Tensor) -> CountedTokens:
        """The counted tokens among the rows of a call's input."""
        reads_source = self.encoder is not None and self.encoder.reads_source(layer, x)
        return self.source_tokens if reads_source else self.tokens

    def read_input(self, x: Tensor, rows: Tensor | None) -> ReadInput:
        """Input-side sums of one call, computed once for layers that read the same tensor one after the other."""
        if self._latest is not None and not self.tokens.only_nonzero_delta and self._latest.is_of(x):
            return self._latest
        values = select(x.reshape(-1, x.shape[-1]), rows)
        sums: dict[MomentName, Tensor] = {}
        if "input_square" in self.needs:
            sums["input_square"] = square_sum(values)
        if "input_outer" in self.needs:
            sums["input_outer"] = outer(values, values)
        if "input_total" in self.needs:
            sums["input_total"] = values.sum(0, dtype=sum_dtype(values))
        self._latest = ReadInput(x, values, sums, finite(values))
        return self._latest

    def finish_batch(self, batch_index: int) -> None:
        """Release what the batch held and refuse one that was not finite, naming the first layer that met it."""
        self._latest = None
        if self.encoder is not None:
            self.encoder.forget()
        # Inputs go bad from the front of the model on, output errors from its back.
        for side, attribute, first_met in (("input", "input_finite", 0), ("output error", "error_finite", -1)):
            flags = {name: getattr(recorder, attribute) for name, recorder in self.recorders.items()}
            bad = [name for name, flag in flags.items() if flag is not None and not bool(flag)]
            if bad:
                raise CalibrationError(
                    f"NaN or Inf in the {side} of layer {bad[first_met]!r} in calibration batch {batch_index} "
                    f"({len(bad)} of {len(flags)} layers). Check the model's weights and that batch; "
                    "float16 models often need bfloat16."
                )
        for recorder in self.recorders.values():
            recorder.input_finite = recorder.error_finite = None


@contextmanager
def capturing(
    layers: Mapping[str, nn.Module],
    needs: frozenset[MomentName],
    stats_device: torch.device | None = None,
    encoder: EncoderSide | None = None,
    projections: Mapping[str, Projection] | None = None,
) -> Iterator[Capture]:
    """Record the named layers of a model while it runs; the hooks are gone afterwards, whatever happened."""
    capture = Capture(needs, stats_device, encoder)
    handles: list[RemovableHandle] = []
    anchors: dict[torch.device, Tensor] = {}

    def tap(
        recorder: LayerRecorder, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
    ) -> Tensor | None:
        x = args[0] if args else next(iter(kwargs.values()))
        tokens = capture.tokens_of(layer, x)
        if not capture.needs_backward:
            recorder.record(x.detach(), None, y.detach() if recorder.reads_output else None, tokens)
            return None
        anchor = anchors.setdefault(y.device, torch.zeros((), device=y.device, requires_grad=True))
        return _Tap.apply(y, x.detach(), anchor, recorder, tokens)

    try:
        for name, layer in layers.items():
            capture.layers.append(layer)
            projection = (projections or {}).get(name, Projection())
            recorder = capture.recorders[name] = LayerRecorder(name, capture, projection)
            handles.append(
                layer.register_forward_hook(
                    lambda layer, args, kwargs, y, recorder=recorder: tap(recorder, layer, args, kwargs, y),
                    with_kwargs=True,
                )
            )
        yield capture
    finally:
        for handle in handles:
            handle.remove()
