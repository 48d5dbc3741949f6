"""The agreement of two halves of the calibration set: a planted signal under noise, noise alone, and no noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from frozencore.maths.allocation import agreed_gains, allocate_ranks
from frozencore.maths.linalg import truncated_svd

M, N, COUNT = 60, 50, 16


def signal(*strengths: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(size, len(strengths), generator=generator)).Q for size in (M, N))
    return U @ torch.tensor(strengths).diag() @ V.mT


def noise(seed: int) -> Tensor:
    """Its largest singular value is about 15."""
    return torch.randn(M, N, generator=torch.Generator().manual_seed(seed))


def test_equal_halves_give_the_squared_singular_values() -> None:
    T = signal(9.0, 4.0, 2.0, 1.0)
    assert agreed_gains(T, T.clone(), 4).tolist() == pytest.approx([81, 16, 4, 1], rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_what_halves_disagree_on_gets_nothing(seed: int) -> None:
    gains = agreed_gains(noise(2 * seed), noise(2 * seed + 1), COUNT)
    assert truncated_svd((noise(2 * seed) + noise(2 * seed + 1)) / 2, COUNT).S[-1] > 5  # the spectrum does not tell
    assert gains.count_nonzero() <= 1
    assert gains.sum() < 15  # of 1,600 that the halves' singular values would promise


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_signal_keeps_its_worth_under_noise_and_the_noise_gets_none(seed: int) -> None:
    T, strengths = signal(80.0, 60.0, 45.0, seed=100 + seed), (80.0, 60.0, 45.0)
    gains = agreed_gains(T + noise(2 * seed), T + noise(2 * seed + 1), COUNT)
    for gain, strength in zip(gains.tolist(), strengths, strict=False):
        assert gain == pytest.approx(strength**2, rel=0.25)
    assert gains[3:].sum() < 15


def test_a_layer_of_noise_gets_no_rank_however_loud_it_is() -> None:
    T = signal(80.0, 60.0, 45.0)
    loud = agreed_gains(100 * noise(1), 100 * noise(2), COUNT)
    quiet = agreed_gains(T + noise(3), T + noise(4), COUNT)
    assert loud.sum() == 0
    assert allocate_ranks({"loud": loud.tolist(), "quiet": quiet.tolist()}, 9) == {"loud": 0, "quiet": 3}


def test_the_order_of_the_halves_does_not_matter_and_a_dead_layer_is_worth_nothing() -> None:
    one, other = signal(30.0, 20.0) + noise(1), signal(30.0, 20.0) + noise(2)
    assert torch.equal(agreed_gains(one, other, 4), agreed_gains(other, one, 4))
    assert not agreed_gains(one, torch.zeros(M, N), 4).any()
    assert not agreed_gains(torch.zeros(M, N), torch.zeros(M, N), 4).any()
