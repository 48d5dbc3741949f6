"""What a model's loss would be with an update of its layers: ``y + P R Qᵀ x``, tried without touching a weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad


@dataclass(frozen=True)
class Update:
    """``L Qᵀ`` of one layer's weight, with ``L = P R``."""

    L: Float[Tensor, "m r"]
    Q: Float[Tensor, "n r"]

    def times(self, size: float) -> Update:
        return Update(self.L * size, self.Q)


@contextmanager
def tried(layers: Mapping[str, nn.Module], updates: Mapping[str, Update]) -> Iterator[None]:
    """Inside, the layers of that name give what they would give with their updates added."""
    with ExitStack() as undo:
        for name, update in updates.items():
            undo.callback(layers[name].register_forward_hook(partial(_plus, update)).remove)
        yield


class NotSideBySideError(Exception):
    """A layer sees other rows than those of the batch, in their order: copies of them cannot be told apart there."""


@contextmanager
def tried_side_by_side(layers: Mapping[str, nn.Module], updates: Sequence[Mapping[str, Update]]) -> Iterator[None]:
    """Inside, of a batch of so many copies of the same rows, each goes through the layers with its own updates.

    Raises:
        NotSideBySideError: In a forward pass, of a layer that does not see rows of tokens (experts, for instance).
    """
    with ExitStack() as undo:
        for name in dict.fromkeys(name for one in updates for name in one):
            own = [one.get(name) for one in updates]
            width = max(update.L.shape[1] for update in own if update is not None)
            some = next(update for update in own if update is not None)
            nothing = Update(some.L[:, :0], some.Q[:, :0])
            L, Q = (
                torch.stack([pad(factor, (0, width - factor.shape[1])) for factor in factors])
                for factors in zip(*((update.L, update.Q) for update in (one or nothing for one in own)), strict=True)
            )
            undo.callback(layers[name].register_forward_hook(partial(_plus_each, L, Q)).remove)
        yield


def _plus_each(L: Tensor, Q: Tensor, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    x, copies = args[0], len(L)
    if x.ndim != 3 or len(x) % copies:
        raise NotSideBySideError
    parts = x.reshape(copies, -1, x.shape[-1])
    L, Q = (factor.to(x.device, x.dtype) for factor in (L, Q))
    return output + ((parts @ Q) @ L.mT).reshape(output.shape).to(output.dtype)


def _plus(update: Update, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    x = args[0]
    Q, L = (factor.to(x.device, x.dtype) for factor in (update.Q, update.L))
    return output + ((x @ Q) @ L.mT).to(output.dtype)
