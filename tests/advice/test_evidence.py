"""Eigenvectors that are computed once for all who ask."""

from __future__ import annotations

import pytest
import torch

from frozencore.advice.evidence import CachedMoments, EigenCache
from frozencore.maths import moments as moments_module
from frozencore.maths.linalg import top_eigenvectors
from frozencore.maths.moments import LayerMoments


def second_moment(seed: int) -> torch.Tensor:
    X = torch.randn(40, 12, generator=torch.Generator().manual_seed(seed))
    return X.mT @ X


def test_they_are_those_of_the_moments_and_layers_of_equal_sums_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(A: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(rank)
        return top_eigenvectors(A, rank)

    monkeypatch.setattr(moments_module, "top_eigenvectors", counted)
    cache, sums = EigenCache(), [second_moment(1), second_moment(1), second_moment(2)]
    for total, rank in [(sums[0], 5), (sums[1], 3), (sums[2], 3), (sums[0], 7), (sums[1], 7)]:
        plain = LayerMoments(num_tokens=40, input_outer=total, error_outer=second_moment(3))
        vectors, values = CachedMoments(**vars(plain), cache=cache).leading("input_outer", rank)
        wanted = top_eigenvectors(total / 40, rank)
        torch.testing.assert_close(vectors, wanted[0])
        torch.testing.assert_close(values, wanted[1])
    assert asked == [5, 3, 7]
    fewer = CachedMoments(num_tokens=20, input_outer=sums[0], cache=cache)
    torch.testing.assert_close(fewer.leading("input_outer", 5)[1], top_eigenvectors(sums[0] / 20, 5)[1])
