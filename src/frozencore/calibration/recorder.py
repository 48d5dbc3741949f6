"""The sums of one layer over all its calls, in float32 or wider.

Products are added in place (``addmm``), so there is no second m x n matrix.

Shapes: a call's counted tokens N, m out features, n in features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from frozencore.errors import CalibrationError
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.maths.sums import add_outer, finite, outer, square_sum, sum_dtype

INPUT_SIDE: frozenset[MomentName] = frozenset({"input_square", "input_outer", "input_total"})
STRIP = 2**24  # entries of a product that are moved to another device at a time
SIDES = (("input", "input_finite", 0), ("output error", "error_finite", -1))
"""Each side, its flag, and the index of the layer where NaN started: bad inputs spread from the first layer, bad output
errors from the last."""


@dataclass(frozen=True)
class ReadInput:
    """The input side of one call.

    Attributes:
        values: The counted rows of x.
        finite: Whether the values are finite.
    """

    values: Float[Tensor, "N n"]
    sums: dict[MomentName, Tensor]
    finite: Tensor

    @classmethod
    def of(cls, values: Float[Tensor, "N n"], needs: frozenset[MomentName]) -> ReadInput:
        sums: dict[MomentName, Tensor] = {}
        if "input_square" in needs:
            sums["input_square"] = square_sum(values)
        if "input_outer" in needs:
            sums["input_outer"] = outer(values, values)
        if "input_total" in needs:
            sums["input_total"] = values.sum(0, dtype=sum_dtype(values))
        return cls(values, sums, finite(values))


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
