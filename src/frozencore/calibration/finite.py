"""Whether what the layers saw was finite, batch by batch: asked at once where it costs nothing, else after the pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from frozencore.calibration.recorder import LayerRecorder
from frozencore.errors import CalibrationError

SIDES = (("input", "input_finite", 0), ("output error", "error_finite", -1))
"""What went bad, its flag, and which layer met it first: inputs go bad from the front of the model on, output errors
from its back."""


@dataclass(frozen=True)
class _Flags:
    """Of one side of one batch: layers, and for those of each device whether they saw finite values."""

    batch: int
    side: str
    first_met: int
    names: tuple[str, ...]
    by_device: tuple[tuple[tuple[int, ...], Tensor], ...]

    def require(self) -> None:
        bad = sorted(
            place
            for places, flags in self.by_device
            for place, fine in zip(places, flags.tolist(), strict=True)
            if not fine
        )
        if bad:
            raise CalibrationError(
                f"NaN or Inf in the {self.side} of layer {self.names[bad[self.first_met]]!r} in calibration batch "
                f"{self.batch} ({len(bad)} of {len(self.names)} layers). Check the model's weights and that batch; "
                "float16 models often need bfloat16."
            )


@dataclass
class FiniteBatches:
    """The flags of a pass, left on their devices; one that waits for a GPU would stop it in every batch."""

    waiting: list[_Flags] = field(default_factory=list)

    def add(self, batch: int, recorders: Mapping[str, LayerRecorder]) -> None:
        """Take a batch's flags.

        Raises:
            CalibrationError: They are on the CPU, and it was not finite.
        """
        for side, attribute, first_met in SIDES:
            by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
            for place, recorder in enumerate(recorders.values()):
                flag: Tensor | None = getattr(recorder, attribute)
                if flag is not None:
                    by_device.setdefault(flag.device, []).append((place, flag))
            stacked = tuple(
                (tuple(place for place, _ in found), torch.stack([flag for _, flag in found]))
                for found in by_device.values()
            )
            flags = _Flags(batch, side, first_met, tuple(recorders), stacked)
            if all(device.type == "cpu" for device in by_device):
                flags.require()
            else:
                self.waiting.append(flags)

    def look(self) -> None:
        """Ask for what waits.

        Raises:
            CalibrationError: A batch was not finite; it is the first.
        """
        while self.waiting:
            self.waiting.pop(0).require()
