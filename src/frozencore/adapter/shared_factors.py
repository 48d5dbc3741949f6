"""P or Q of every adapter on one layer: one buffer for each basis, however many adapters use it.

The buffer has the name of one adapter; the others refer to it. So a state dict holds each basis once, and libraries
that copy, save or load tensors never meet one tensor under two names. They are buffers and not frozen parameters,
because trainers count, cast, shard and leave out parameters (ZeRO-3 saves without frozen ones). accelerate's FSDP2
takes a module to the meta device and back, and expects that all of a state dict is sharded by then. It keeps buffers
that torch counts as not persistent; so do we, and write and read them here, except on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.quiet import with_attributes


class SharedFactors(nn.Module):
    """Tensors by adapter name. Equal tensors become one when they are set or loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def keys(self) -> list[str]:
        """The adapters' names."""
        return list(self._owners)

    def __getitem__(self, name: str) -> Tensor:
        held = self._buffers[self._owners[name]]
        assert held is not None
        return held

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        """Give an adapter a tensor of its own."""
        if name in self._owners:
            del self[name]
        self.register_buffer(name, tensor, persistent=False)
        self._owners[name] = name

    def __delitem__(self, name: str) -> None:
        held = self[name]
        owner = self._owners.pop(name)
        if owner == name:
            delattr(self, name)
            if heirs := [other for other, its in self._owners.items() if its == name]:
                self.register_buffer(heirs[0], held, persistent=False)
                self._owners |= dict.fromkeys(heirs, heirs[0])

    def join(self, name: str, other: str) -> None:
        """Let an adapter use another adapter's tensor."""
        if self._owners.get(name, name) != self._owners[other]:
            if name in self._owners:
                del self[name]
            self._owners[name] = self._owners[other]

    def joined(self, name: str) -> list[str]:
        """The adapters that use the tensor of this one, itself included."""
        return [other for other, owner in self._owners.items() if owner == self._owners[name]]

    def fill(self, name: str, values: Tensor) -> None:
        """Give an adapter new values. Others that share a tensor keep theirs, unless it was not set yet."""
        own = self[name]
        if len(self.joined(name)) > 1 and (own.is_meta or own.any()):
            self[name] = values.to(own.device, own.dtype, copy=True)
        else:
            own.copy_(values)
        self.share(name)

    def share(self, name: str) -> None:
        """Use another adapter's tensor if it is equal."""
        own = self[name]
        if own.is_meta or not own.any():  # not set yet
            return
        for other in dict.fromkeys(self._owners.values()):
            X = self[other]
            alike = (X.shape, X.dtype, X.device) == (own.shape, own.dtype, own.device)
            if other != self._owners[name] and alike and torch.equal(X, own):
                for one in self.joined(name):
                    self.join(one, other)
                return

    def make_room(self, came: list[str], cores: list[str]) -> None:
        """Prepare to load tensors, each into a buffer of its own.

        Args:
            came: The adapters whose tensors are in the state dict.
            cores: The adapters whose cores are in it. One without a tensor shared it when the state dict was made; if
                several tensors are possible, torch's error names the missing one.
        """
        groups = {name: [name] for name in came}
        for name in cores:
            if name not in came:
                possible = [other for other in came if other in self.joined(name)] or came
                if len(possible) == 1:
                    groups[possible[0]].append(name)
        for name, group in groups.items():
            own = self[name]
            self[name] = own if set(self.joined(name)) <= set(group) else own.clone()
            for follower in group[1:]:
                self.join(follower, name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._persistent({name for name, held in self.named_buffers() if not held.is_meta}):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        with self._persistent({n for n, held in self.named_buffers() if not held.is_meta or prefix + n in state_dict}):
            super()._load_from_state_dict(state_dict, prefix, *args)

    def _persistent(self, names: set[str]) -> AbstractContextManager[None]:
        """Let torch count these buffers as persistent inside."""
        return with_attributes(self, _non_persistent_buffers_set=self._non_persistent_buffers_set - names)
