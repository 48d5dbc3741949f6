"""The product of a core with its basis, ``y + s·P R Qᵀ x``: one core for all rows, or a core for each row of a batch.

Shapes: P m x r, Q n x r, R r x r.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from frozencore.errors import ConfigError


def plus_core(y: Tensor, x: Tensor, P: Tensor, Q: Tensor, R: nn.Linear | Tensor, scale: float) -> Tensor:
    """``y + s·P R Qᵀ x`` in the dtype of y.

    The product with R is in the dtype of R; the other two are in the dtype of P and Q.

    Args:
        y: The base layer's output (..., m).
        x: Its input (..., n), in the dtype of Q.
        R: A linear layer r -> r; or r x r; or rows x r x r, a core for each row of x.

    >>> x, P, Q, R = torch.ones(1, 4), torch.ones(3, 2), torch.ones(4, 2), torch.eye(2)
    >>> plus_core(torch.ones(1, 3), x, P, Q, R, 0.5)
    tensor([[5., 5., 5.]])
    """
    z = x @ Q
    u = _times_cores(z.to(R.dtype), R) if isinstance(R, Tensor) else R(z.to(R.weight.dtype))
    u = u.to(P.dtype)
    if y.dtype == P.dtype == z.dtype:  # z has another dtype under autocast, which would round a wider y
        m, r = P.shape
        return torch.addmm(y.reshape(-1, m), u.reshape(-1, r), P.mT, alpha=scale).view(y.shape)
    return y + ((u * scale) @ P.mT).to(y.dtype)


def _times_cores(z: Tensor, R: Tensor) -> Tensor:
    """``z Rᵀ`` with one core, or with a core for each row: z (..., r) with the tokens of a row contiguous."""
    if R.ndim == 2:
        return linear(z, R)
    rows, r, _ = R.shape
    if z.numel() == rows * r:  # one token a row, as in generation: bmm takes 2 to 5 times as long
        return (R.mT * z.reshape(rows, r, 1)).sum(1).view(z.shape)
    return torch.bmm(z.reshape(rows, -1, r), R.mT).view(z.shape)


@dataclass(frozen=True)
class CorePart:
    """Cores on one basis: R is rows x r x r, one for each row of a batch; or r x r for the numbered rows alone.

    The values of R may change between two calls of a compiled model. Rows of one token are fastest if the transposes
    are contiguous.
    """

    P: Tensor
    Q: Tensor
    R: Tensor
    scale: float
    rows: Tensor | None = None


def _running_task() -> object | None:
    """The asyncio task that runs in this thread."""
    return None if asyncio._get_running_loop() is None else asyncio.current_task()


@dataclass(frozen=True, eq=False)
class PerRowCores:
    """The cores of a batch's rows in one layer; without parts all rows are the base model's.

    Attributes:
        owner: The asyncio task that entered the batch; the thread if there is no task.
    """

    parts: tuple[CorePart, ...] = ()
    num_named: int = 0
    owner: object = field(default_factory=lambda: _running_task() or threading.get_ident())

    @property
    def num_rows(self) -> int:
        """The number of rows; from a shape if possible, so that a compiled model serves batches of many sizes."""
        return len(self.parts[0].R) if self.parts and self.parts[0].rows is None else self.num_named

    def require_owner(self, layer: str) -> None:
        """Refuse a pass of another thread or task, not of this batch; autograd's threads compute its blocks again."""
        if self.owner in (threading.get_ident(), _running_task()) or torch._C._current_graph_task_id() != -1:
            return
        raise ConfigError(
            f"A batch with a core for each row belongs to one thread and one asyncio task, but another one called "
            f"layer {layer!r} meanwhile. Call the model where bank.rows(...) was entered; run a plain batch of another "
            "thread in bank.rows([None, ...]), which waits; let one task at a time call it (asyncio.Lock)."
        )


def require_batch_axis(module: Any, name: str) -> None:
    """Refuse a core for each row where the first axis of a module's input is not known to be the batch."""
    if not getattr(module, "has_batch_axis", None):
        raise ConfigError(
            f"With a core for each row, a layer's first axis must be the batch, but that of {name!r} is not known to "
            "be (it may be tokens, windows, or an expert's share). Run the rows of each adapter alone."
        )
