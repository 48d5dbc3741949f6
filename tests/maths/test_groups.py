"""One basis for groups: what it maximises, and what of a group it holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drawn import drawn_layer
from frozencore.constructors.fcca import fcca_basis
from frozencore.constructors.random import random_basis
from frozencore.errors import CalibrationError
from frozencore.maths.capture import share_held
from frozencore.maths.groups import PooledDiagonals, RunningStack, merged, shared_spans
from frozencore.maths.linalg import principal_cosines
from frozencore.maths.moments import LayerMoments
from references import numpy_of


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(T: Tensor) -> Tensor:
    return T / T.flatten(-2).norm(dim=-1)[..., None, None]


def orthonormal(seed: int, *shape: int) -> Tensor:
    return torch.linalg.qr(drawn(seed, *shape)).Q


def held(T: Tensor, U: Tensor, V: Tensor) -> float:
    """``Σ_k ‖UᵀT_kV‖²`` one group after the other, in NumPy."""
    return sum(float((numpy_of(U).T @ numpy_of(one) @ numpy_of(V)).__pow__(2).sum()) for one in T)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_no_round_lowers_the_sum_and_the_spans_hold_what_they_say(seed: int, K: int, p: int, q: int, r: int) -> None:
    T = unit(drawn(seed, K, p, q))
    spans = shared_spans(T, r)
    assert all(after >= before - 1e-12 for before, after in zip(spans.sums, spans.sums[1:], strict=False))
    assert spans.sums[-1] == pytest.approx(held(T, spans.U, spans.V), rel=1e-9)
    for X, energy in ((spans.U, spans.left_energy), (spans.V, spans.right_energy)):
        torch.testing.assert_close(X.mT @ X, torch.eye(min(r, p, q), dtype=torch.float64))
        assert float(energy.sum()) == pytest.approx(spans.sums[-1], rel=1e-6)
        assert bool((energy[:-1] >= energy[1:] - 1e-12).all())


def test_the_gains_add_up_to_what_the_leading_directions_hold_and_are_squared_singular_values_of_one_group() -> None:
    T = unit(drawn(4, 5, 12, 9))
    spans = shared_spans(T, 4)
    for k in range(1, 5):
        assert float(spans.gains[:k].sum()) == pytest.approx(held(T, spans.U[:, :k], spans.V[:, :k]), rel=1e-9)
    S = np.linalg.svd(numpy_of(T[0]), compute_uv=False)
    np.testing.assert_allclose(numpy_of(shared_spans(T[:1], 4).gains), S[:4] ** 2, rtol=1e-9)


def test_no_small_turn_of_the_spans_holds_more() -> None:
    """A maximum, not only an end: ascent along any rotation of either span gains nothing."""
    T = unit(drawn(3, 5, 12, 9))
    spans = shared_spans(T, 3)
    for seed in range(200):
        U = torch.linalg.qr(spans.U + 1e-2 * drawn(seed, 12, 3)).Q
        V = torch.linalg.qr(spans.V + 1e-2 * drawn(seed + 999, 9, 3)).Q
        assert held(T, U, V) <= spans.sums[-1] + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(3, 9), st.integers(3, 9), st.integers(1, 3), st.data())
def test_spans_that_grow_keep_the_given_ones_and_no_round_lowers_the_sum(
    seed: int, K: int, p: int, q: int, r: int, data: st.DataObject
) -> None:
    T, given_first = unit(drawn(seed, K, p, q)), data.draw(st.integers(0, r - 1))
    spans = shared_spans(T, r, given_first)
    assert all(after >= before - 1e-12 for before, after in zip(spans.sums, spans.sums[1:], strict=False))
    assert spans.sums[-1] == pytest.approx(held(T, spans.U, spans.V), rel=1e-9)
    for X, energy in ((spans.U, spans.left_energy), (spans.V, spans.right_energy)):
        torch.testing.assert_close(X.mT @ X, torch.eye(r, dtype=torch.float64))
        assert torch.equal(X[:, :given_first], torch.eye(len(X), given_first, dtype=torch.float64))
        assert float(energy.sum()) == pytest.approx(spans.sums[-1], rel=1e-6)
    for step in range(20):  # no new direction in their place holds more
        turned = [X[given_first:, given_first:] + 1e-2 * drawn(step, *X[given_first:, given_first:].shape)
                  for X in (spans.U, spans.V)]  # fmt: skip
        pair = [torch.block_diag(torch.eye(given_first, dtype=torch.float64), torch.linalg.qr(X).Q) for X in turned]
        assert held(T, *pair) <= spans.sums[-1] + 1e-7


def test_one_group_has_the_leading_singular_spans() -> None:
    T = unit(drawn(1, 1, 12, 9))
    spans = shared_spans(T, 4)
    U, S, Vh = np.linalg.svd(numpy_of(T[0]))
    assert principal_cosines(spans.U, torch.tensor(U[:, :4])).min() > 1 - 1e-9
    assert principal_cosines(spans.V, torch.tensor(Vh[:4].T)).min() > 1 - 1e-9
    np.testing.assert_allclose(numpy_of(spans.left_energy), S[:4] ** 2, rtol=1e-9)


def test_planted_spans_are_found_where_the_mean_of_the_groups_is_zero() -> None:
    """Two groups want the opposite along the same directions: their mean cancels, their spans do not."""
    U, V, core = orthonormal(1, 30, 3), orthonormal(2, 20, 3), drawn(3, 3, 3)
    T = unit(torch.stack([U @ core @ V.mT, -U @ core @ V.mT]))
    assert float(T.mean(0).norm()) < 1e-12
    spans = shared_spans(T, 3)
    assert spans.sums[-1] == pytest.approx(2, rel=1e-9)
    assert principal_cosines(spans.U, U).min() > 1 - 1e-9
    assert principal_cosines(spans.V, V).min() > 1 - 1e-9


def test_groups_that_differ_are_all_held_where_the_means_own_spans_lose_them() -> None:
    """Six groups share four directions a side, each with a core and a strong wish of its own."""
    U, V = orthonormal(1, 40, 4), orthonormal(2, 30, 4)
    own = 0.8 * unit(drawn(5, 6, 40, 1) @ drawn(6, 6, 1, 30))
    T = unit(unit(U @ drawn(4, 6, 4, 4) @ V.mT) + own)
    spans = shared_spans(T, 4)
    left, _, right = torch.linalg.svd(T.mean(0))
    assert held(T, spans.U, spans.V) > 1.2 * held(T, left[:, :4], right[:4].mT)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5))
def test_a_running_factor_ends_at_the_leading_directions_of_all_matrices(seed: int, K: int) -> None:
    """Exactly, where it is as wide as their ranks together."""
    stack, factor = [drawn(seed + k, 15, 2) for k in range(K)], torch.zeros(15, 0, dtype=torch.float64)
    for one in stack:
        factor = merged(factor, one, 10)
    expected = sum(numpy_of(one) @ numpy_of(one).T for one in stack)
    np.testing.assert_allclose(numpy_of(factor @ factor.mT), expected, rtol=1e-7, atol=1e-9)


def test_spans_of_running_factors_hold_nearly_what_all_matrices_at_once_do() -> None:
    """Sixteen groups with slowly falling spectra, half of each its own; twice the rank of each, eight times in all."""
    fall, r = torch.arange(1, 129, dtype=torch.float64) ** -0.3, 4
    shared = orthonormal(1, 160, 24) @ (fall[:24, None] * drawn(2, 16, 24, 24) * fall[:24]) @ orthonormal(3, 128, 24).mT
    own = (torch.linalg.qr(drawn(4, 16, 160, 128)).Q * fall) @ torch.linalg.qr(drawn(5, 16, 128, 128)).Q
    T = unit(unit(shared) + unit(own))
    L, R = torch.zeros(160, 0, dtype=torch.float64), torch.zeros(128, 0, dtype=torch.float64)
    for one in T:
        U, S, Vh = torch.linalg.svd(one, full_matrices=False)
        L, R = merged(L, U[:, : 2 * r] * S[: 2 * r], 8 * r), merged(R, Vh[: 2 * r].mT * S[: 2 * r], 8 * r)
    within = torch.linalg.qr(L).Q.mT @ T @ torch.linalg.qr(R).Q
    assert 0.98 < shared_spans(within, r).sums[-1] / shared_spans(T, r).sums[-1] <= 1 + 1e-6


def test_a_narrow_running_factor_keeps_what_counts_in_a_long_stream() -> None:
    planted = orthonormal(7, 50, 3)
    factor = torch.zeros(50, 0, dtype=torch.float64)
    for k in range(200):
        factor = merged(factor, torch.cat([planted @ drawn(k, 3, 2), 0.3 * drawn(k + 500, 50, 2)], dim=1), 8)
    assert principal_cosines(factor[:, :3], planted).min() > 0.98


def test_a_stack_of_more_matrices_than_it_holds_has_nearly_the_sum_of_all_and_keeps_few() -> None:
    """Sums over two thousand matrices near a space of ten, in 40 to 80 that are held."""
    space = drawn(1, 10, 6, 5)
    M = unit(torch.einsum("kj,jpq->kpq", drawn(2, 2000, 10), space) + 0.1 * drawn(3, 2000, 6, 5))
    stack = RunningStack(80)
    for one in M:
        stack.add(one)
        assert len(stack._held) <= 80
    few = stack.taken()
    assert not stack.is_whole
    U, V = orthonormal(4, 6, 2), orthonormal(5, 5, 2)
    assert held(few, U, V) == pytest.approx(held(M, U, V), rel=1e-9)  # 30 entries: no sum needs more than 30 matrices
    narrow = RunningStack(24)
    for one in M:
        narrow.add(one)
    assert 0.99 * held(M, U, V) < held(narrow.taken(), U, V) <= held(M, U, V) * (1 + 1e-9)


def pooled(groups: list[LayerMoments], weights: list[float]) -> LayerMoments:
    found = PooledDiagonals()
    for group, weight in zip(groups, weights, strict=True):
        found.add(group, weight)
    return found.moments()


def test_pooled_diagonals_depend_neither_on_the_scale_of_a_loss_nor_on_the_number_of_rows() -> None:
    one, other = drawn_layer(seed=1), drawn_layer(seed=2)
    expected = pooled([one.moments(), other.moments()], [1.0, 3.0])
    louder = dataclasses.replace(other, E=1e4 * other.E)
    longer = dataclasses.replace(one, X=np.tile(one.X, (3, 1)), E=np.tile(one.E, (3, 1)))
    found = pooled([longer.moments(), louder.moments()], [1.0, 3.0])
    torch.testing.assert_close(found.a, expected.a, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.d, expected.d, rtol=1e-12, atol=0)
    assert float(found.a.mean()) == pytest.approx(1)


def test_a_group_without_gradient_does_not_change_the_pooled_errors() -> None:
    one = drawn_layer(seed=1)
    silent = dataclasses.replace(drawn_layer(seed=2), E=0 * one.E)
    found, alone = (
        pooled(groups, [1.0] * len(groups)) for groups in ([one.moments(), silent.moments()], [one.moments()])
    )
    torch.testing.assert_close(found.d, alone.d, rtol=1e-12, atol=0)


def test_fcca_of_the_same_rows_holds_the_best_share_of_its_rank_and_a_random_basis_the_random_one() -> None:
    moments = drawn_layer(40, 30).moments()
    best = share_held(moments, fcca_basis(moments, 3))
    assert best.held == pytest.approx(best.own, rel=1e-6)
    assert best.random == 9 / 1200
    drawn_bases = [share_held(moments, random_basis((40, 30), 3, seed=seed)) for seed in range(20)]
    assert all(share.own == best.own and share.held < best.held for share in drawn_bases)
    everything = share_held(moments, random_basis((40, 30), 30, seed=0))
    assert everything.own == pytest.approx(1, rel=1e-6)


def test_in_the_plain_metric_random_bases_hold_the_mean_that_is_said() -> None:
    T, m, n, r = unit(drawn(1, 20, 15)), 20, 15, 4
    shares = [held(T[None], orthonormal(2 * seed, m, r), orthonormal(2 * seed + 1, n, r)) for seed in range(2000)]
    assert np.mean(shares) == pytest.approx(r * r / (m * n), rel=0.05)


def test_a_share_of_no_gradient_is_refused() -> None:
    layer = drawn_layer()
    silent = dataclasses.replace(layer.moments(), cross=torch.zeros(12, 10, dtype=torch.float64))
    with pytest.raises(CalibrationError, match="it is zero everywhere"):
        share_held(silent, fcca_basis(layer.moments(), 2))
