"""What a constructor may look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frozencore.errors import CalibrationError
from frozencore.maths.linalg import seeded_generator
from frozencore.maths.moments import LayerMoments
from frozencore.torch_later import torch


@dataclass(frozen=True)
class LayerEvidence:
    """What a constructor may look at in one layer.

    Attributes:
        name: The layer's name; together with the seed it fixes the layer's random directions.
        shape: (m, n): outputs, inputs.
        weight: Gives W (m x n, float) when asked, dequantised if need be.
        moments: Calibration moments; None for a constructor that needs no data.
    """

    name: str
    shape: tuple[int, int]
    weight: Callable[[], torch.Tensor]
    moments: LayerMoments | None = None

    @property
    def data(self) -> LayerMoments:
        if self.moments is None:
            raise CalibrationError(
                f"This constructor needs calibration moments, but layer {self.name!r} has none. "
                "Call frozencore.calibrate(model, dataloader) first."
            )
        return self.moments

    def seed(self, seed: int) -> int:
        """A seed of this layer's own, so that layers draw independently of their order."""
        return seeded_generator(seed, "layer", self.name).initial_seed()
