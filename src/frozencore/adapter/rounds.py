"""Rounds of an adapter that is refreshed while it trains: ``y = W x + s·Σ_j P_j R_j Q_jᵀ x``, only the last R trained.

The bases of all rounds are side by side in P and Q, and the cores are blocks of one R. So the sum is one product of
k = r_1 + … + r_j columns, and code that reads P, R and Q of an adapter reads the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from torch import Tensor, nn
from torch.nn.functional import pad

from frozencore.adapter.shared_factors import SharedFactors
from frozencore.maths.basis import Basis


def with_last_core(past: Tensor, R: Tensor) -> Tensor:
    """Combine the cores of all rounds as blocks of one matrix (k x k), with R (r x r) as the last block."""
    earlier = len(past) - len(R)
    return past + pad(R, (earlier, 0, earlier, 0))


def without_last_core(whole: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Split that matrix into copies: the earlier cores with zeros for the last, and the last core (r x r)."""
    past, earlier = whole.clone(), len(whole) - r
    past[earlier:, earlier:] = 0
    return past, whole[earlier:, earlier:].clone()


class AdapterRounds:
    """P, Q and the cores of the adapters on one layer with n inputs and m outputs, by adapter name.

    ``frozencore_P``, ``frozencore_Q``: buffers m x k and n x k, r columns a round. ``frozencore_R``: bias-free linear
    layers r -> r, the core of the last round. ``frozencore_past``: after the first round, the earlier cores, k x k with
    zeros for the last.
    """

    base_layer: nn.Module
    frozencore_P: SharedFactors
    frozencore_Q: SharedFactors
    frozencore_R: nn.ModuleDict
    frozencore_past: BufferDict
    frozencore_scale: dict[str, float]

    def core(self, adapter_name: str) -> Tensor:
        """The core that trains: R (r x r) of the last round."""
        linear: Any = self.frozencore_R[adapter_name]
        return linear.weight

    def factors(self, adapter_name: str) -> tuple[Tensor, Tensor, Tensor]:
        """P (m x k), Q (n x k) and R (k x k) of an adapter; k = r in the first round, where R is the core itself."""
        R = self.core(adapter_name)
        if adapter_name in self.frozencore_past:
            R = with_last_core(self.frozencore_past[adapter_name], R)
        return self.frozencore_P[adapter_name], self.frozencore_Q[adapter_name], R

    def rank(self, adapter_name: str) -> int:
        """k of an adapter in this layer: r times its rounds."""
        return self.frozencore_P[adapter_name].shape[1]

    def begin_round(self, adapter_name: str, basis: Basis) -> None:
        """Keep P, Q and R, and add a basis of the same r beside them, with a zero core."""
        P, Q, whole = self.factors(adapter_name)
        R = self.core(adapter_name)
        with torch.no_grad():
            self.frozencore_past[adapter_name] = pad(whole.detach(), (0, len(R), 0, len(R)))
            self.frozencore_P[adapter_name] = torch.cat([P, basis.P.to(P.device, P.dtype)], dim=1)
            self.frozencore_Q[adapter_name] = torch.cat([Q, basis.Q.to(Q.device, Q.dtype)], dim=1)
            R.zero_()

    def tensors_of_past(self, adapter_name: str) -> Iterator[Tensor]:
        """The tensors that earlier rounds keep in memory: P and Q, and all cores."""
        if adapter_name in self.frozencore_past:
            P, Q, past = (held[adapter_name] for held in (self.frozencore_P, self.frozencore_Q, self.frozencore_past))
            earlier = P.shape[1] - len(self.core(adapter_name))
            yield from (P[:, :earlier], Q[:, :earlier], past)

    def take_back_round(self, adapter_name: str) -> None:
        """Undo :meth:`begin_round`: drop the last round and train the previous one again."""
        R = self.core(adapter_name)
        earlier = self.rank(adapter_name) - len(R)
        before = earlier - len(R)
        past, last = without_last_core(self.frozencore_past[adapter_name][:earlier, :earlier], len(R))
        with torch.no_grad():
            R.copy_(last)
        if before:
            self.frozencore_past[adapter_name] = past
        else:
            del self.frozencore_past[adapter_name]
        self.frozencore_P[adapter_name] = self.frozencore_P[adapter_name][:, :earlier].contiguous()
        self.frozencore_Q[adapter_name] = self.frozencore_Q[adapter_name][:, :earlier].contiguous()

    def set_rounds(self, adapter_name: str, rounds: int) -> None:
        """Allocate zero factors for this number of rounds, unless there are as many already."""
        P, Q, R = self.frozencore_P[adapter_name], self.frozencore_Q[adapter_name], self.core(adapter_name)
        k = rounds * len(R)
        if P.shape[1] == k:
            return
        self.frozencore_P[adapter_name] = P.new_zeros(len(P), k)
        self.frozencore_Q[adapter_name] = Q.new_zeros(len(Q), k)
        if adapter_name in self.frozencore_past:
            del self.frozencore_past[adapter_name]
        if rounds > 1:
            self.frozencore_past[adapter_name] = R.new_zeros(k, k)

    def move_past(self, adapter_name: str, *where: Any) -> None:
        """Move the earlier cores to another device or dtype, as ``Tensor.to`` does."""
        if adapter_name in self.frozencore_past:
            self.frozencore_past[adapter_name] = self.frozencore_past[adapter_name].to(*where)
