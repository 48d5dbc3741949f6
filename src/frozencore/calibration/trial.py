"""What a model's loss would be with an update of its layers: ``y + P R Qᵀ x``, tried without touching a weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn


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


def _plus(update: Update, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    x = args[0]
    Q, L = (factor.to(x.device, x.dtype) for factor in (update.Q, update.L))
    return output + ((x @ Q) @ L.mT).to(output.dtype)
