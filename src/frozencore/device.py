"""A device by its name, if it is there, and how much it holds."""

from __future__ import annotations

import os

import torch

from frozencore.errors import ConfigError


def find_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: This machine has none, or it is no name of a device.
    """
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"There is no device {name!r} here. Use cpu, or cuda where there is a GPU.") from error


def sent(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """The tensor on a device (None: where it is), without waiting unless that is the CPU, which reads at once."""
    return tensor if device is None else tensor.to(device, non_blocking=device.type != "cpu")


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU; of the machine, for any other device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
