"""Where there is too little memory for a pass: its sums go to the CPU, or its layers into more passes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from frozencore.calibration.budget import PassPlan
from frozencore.errors import CalibrationError


def halved(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The same layers in groups of at most half as many as the first one has."""
    size = len(groups[0])
    if size == 1:
        raise CalibrationError(
            f"There is no memory to calibrate layer {groups[0][0]!r} even alone. Calibrate on smaller batches or "
            'shorter text, or with options=CalibrationOptions(stats_device="cpu").'
        )
    half = -(-size // 2)
    warnings.warn(
        f"Out of memory with {size} layers in a pass: calibration goes on with {half} at a time, which takes more "
        "passes and gives the same bases. Pass memory_budget to have them planned.",
        stacklevel=4,
    )
    return [group[i : i + half] for group in groups for i in range(0, len(group), half)]


def sums_device(model: nn.Module, plan: PassPlan, asked: str | None) -> str | None:
    """Where the sums go: as asked, else the model's device (None) unless the plan's share of it is taken."""
    device = next(model.parameters()).device
    if asked is not None or plan.peak_bytes == 0 or device.type != "cuda":
        return asked
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None if plan.peak_bytes <= torch.cuda.mem_get_info(device)[0] + unused else "cpu"
