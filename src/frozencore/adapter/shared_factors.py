"""P or Q of every adapter on one layer: one buffer for each basis, however many adapters use it.

The buffer has the name of one adapter; the others refer to it. So a state dict has each basis once, and libraries
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

from frozencore.attributes import with_attributes


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
        tensor = self._buffers[self._owners[name]]
        assert tensor is not None
        return tensor

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        """Give an adapter a tensor that it shares with no other."""
        if name in self._owners:
            del self[name]
        self.register_buffer(name, tensor, persistent=False)
        self._owners[name] = name

    def __delitem__(self, name: str) -> None:
        tensor = self[name]
        owner = self._owners.pop(name)
        if owner == name:
            delattr(self, name)
            if heirs := [other for other, its in self._owners.items() if its == name]:
                self.register_buffer(heirs[0], tensor, persistent=False)
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
        tensor = self[name]
        if len(self.joined(name)) > 1 and (tensor.is_meta or tensor.any()):
            self[name] = values.to(tensor.device, tensor.dtype, copy=True)
        else:
            tensor.copy_(values)
        self.share(name)

    def share(self, name: str) -> None:
        """Use another adapter's tensor if it is equal."""
        tensor = self[name]
        if tensor.is_meta or not tensor.any():  # not set yet
            return
        for other in dict.fromkeys(self._owners.values()):
            X = self[other]
            alike = (X.shape, X.dtype, X.device) == (tensor.shape, tensor.dtype, tensor.device)
            if other != self._owners[name] and alike and torch.equal(X, tensor):
                for one in self.joined(name):
                    self.join(one, other)
                return

    def split_shared(self, loaded: list[str], cores: list[str]) -> None:
        """Prepare to load tensors, each into a separate buffer.

        Args:
            loaded: The adapters whose tensors are in the state dict.
            cores: The adapters whose cores are in it. An adapter without a tensor shared one when the state dict was
                made; if several tensors are possible, torch's error names the missing one.
        """
        groups = {name: [name] for name in loaded}
        for name in cores:
            if name not in loaded:
                possible = [other for other in loaded if other in self.joined(name)] or loaded
                if len(possible) == 1:
                    groups[possible[0]].append(name)
        for name, group in groups.items():
            tensor = self[name]
            self[name] = tensor if set(self.joined(name)) <= set(group) else tensor.clone()
            for follower in group[1:]:
                self.join(follower, name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with self._persistent({name for name, tensor in self.named_buffers() if not tensor.is_meta}):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        with self._persistent(
            {n for n, tensor in self.named_buffers() if not tensor.is_meta or prefix + n in state_dict}
        ):
            super()._load_from_state_dict(state_dict, prefix, *args)

    def _persistent(self, names: set[str]) -> AbstractContextManager[None]:
        """Let torch count these buffers as persistent inside."""
        return with_attributes(self, _non_persistent_buffers_set=self._non_persistent_buffers_set - names)
