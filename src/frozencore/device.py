"""A device by its name, if it is there."""

from __future__ import annotations

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
