"""P or Q of every adapter on one layer; adapters on the same basis share one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from torch import Tensor


class SharedFactors(BufferDict):
    """Buffers by adapter name. Equal buffers become one tensor when they are set or loaded; each is saved."""

    def __init__(self) -> None:
        super().__init__({}, persistent=True)

    def fill(self, name: str, values: Tensor) -> None:
        """Give an adapter new values, in place if no other adapter shares the tensor."""
        own = self[name]
        if self._others_hold(name):
            self[name] = values.to(own.device, own.dtype, copy=True)
        else:
            own.copy_(values)
        self.share(name)

    def share(self, name: str) -> None:
        """Use another adapter's tensor if it is equal."""
        own = self[name]
        if own.is_meta or not own.any():  # not set yet
            return
        for other in self._distinct():
            if other is not own and _equal(other, own):
                self[name] = other
                return

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        came = [name for name in self if f"{prefix}{name}" in state_dict]
        for name in came:
            if self._others_hold(name):  # loading would copy in place
                self[name] = torch.empty_like(self[name])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name in came:
            self.share(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SharedFactors:
        """Move or cast the buffers; torch's method would give each adapter its own copy."""
        held = dict(self.items())
        moved: dict[int, Tensor] = {}
        super()._apply(fn, recurse)
        for name, before in held.items():
            self[name] = moved.setdefault(id(before), self[name])
        return self

    def _others_hold(self, name: str) -> bool:
        return any(held is self[name] for other, held in self.items() if other != name)

    def _distinct(self) -> list[Tensor]:
        return list({id(held): held for held in self.values()}.values())


def _equal(left: Tensor, right: Tensor) -> bool:
    same_kind = left.shape == right.shape and left.dtype == right.dtype and left.device == right.device
    return same_kind and not left.is_meta and torch.equal(left, right)
