"""Compressing updates into one basis, against a dense Tucker-2 in float64 that forms every update."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from frozencore import maths
from frozencore.errors import CalibrationError
from frozencore.maths.basis import LayerBasis
from frozencore.maths.compress import (
    CutAlone,
    Update,
    compress,
    core_of,
    energy,
    sharing_keeps_more_from,
    singular_energies,
)
from frozencore.maths.quantise import levels, quantise

M, N = 14, 11


def drawn(ranks: list[int], seed: int = 0, m: int = M, n: int = N) -> list[Update]:
    """Updates of these ranks, of very different sizes, whose singular values decay."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [(10.0**t * normal(m, k) * 0.6 ** torch.arange(k), normal(k, n)) for t, k in enumerate(ranks)]


def dense_tucker(updates: list[Update], rank: int, sweeps: int = 2000) -> tuple[Tensor, float]:
    """HOOI of whole updates, each divided by its norm: start from the stack, then exact SVDs in turn."""
    whole = torch.stack([B @ A / torch.linalg.matrix_norm(B @ A) for B, A in updates])
    P = torch.linalg.svd(torch.cat(list(whole), dim=1)).U[:, :rank]
    for _ in range(sweeps):
        Q = torch.linalg.svd(torch.cat([D.mT @ P for D in whole], dim=1)).U[:, :rank]
        P = torch.linalg.svd(torch.cat([D @ Q for D in whole], dim=1)).U[:, :rank]
    return P, float((P.mT @ whole @ Q).square().sum())


def kept_by(basis: LayerBasis, updates: list[Update]) -> float:
    """The sum of the shares that the updates keep, of updates that are not zero."""
    whole = [B @ A for B, A in updates]
    return sum(float((basis.P.mT @ D @ basis.Q).square().sum() / D.square().sum()) for D in whole)


@pytest.mark.parametrize("ranks", [[3, 3, 3, 3], [1, 2, 6, 4, 1]])
@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_basis_and_the_cores_are_those_of_a_dense_tucker_decomposition(
    ranks: list[int], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maths.compress, "TOLERANCE", 0.0)
    updates = drawn(ranks)
    found = compress(updates, rank)
    P, objective = dense_tucker(updates, rank)
    assert kept_by(found, updates) == pytest.approx(objective, rel=1e-6)
    torch.testing.assert_close(found.P @ found.P.mT, P @ P.mT, atol=1e-2, rtol=0)
    for B, A in updates:
        torch.testing.assert_close(core_of(found.P, found.Q, (B, A)), found.P.mT @ (B @ A) @ found.Q)


@pytest.mark.parametrize("exact_width", [512, 0])
def test_no_sweep_loses_and_the_factors_are_orthonormal(exact_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths.compress, "EXACT_WIDTH", exact_width)
    monkeypatch.setattr(maths.compress, "TOLERANCE", 0.0)
    for seed in range(5):
        updates, objectives = drawn([4, 2, 5, 3], seed), []
        for sweeps in range(4):
            monkeypatch.setattr(maths.compress, "MOST_SWEEPS", sweeps)
            found = compress(updates, 3)
            objectives.append(kept_by(found, updates))
        assert all(after >= before - 1e-12 for before, after in pairwise(objectives))
        assert objectives[-1] > objectives[0]
        for X in (found.P, found.Q):
            torch.testing.assert_close(X.mT @ X, torch.eye(3, dtype=X.dtype))


def test_power_steps_reach_what_exact_steps_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths.compress, "TOLERANCE", 1e-9)
    updates = drawn([4, 2, 5, 3])
    exact = compress(updates, 4)
    monkeypatch.setattr(maths.compress, "EXACT_WIDTH", 0)
    powers = compress(updates, 4)
    assert kept_by(powers, updates) == pytest.approx(kept_by(exact, updates), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", ["ranks that fit", "one span"])
def test_what_fits_is_kept_exactly(case: str, dtype: torch.dtype) -> None:
    updates = drawn([2, 1, 3]) if case == "ranks that fit" else drawn([6] * 4)
    if case == "one span":
        (B, _), (_, A) = updates[0], updates[1]
        cores = [R @ R2 for R, (_, R2) in zip([torch.randn(6, 6).double()] * 4, drawn([6] * 4, 3, 6, 6), strict=True)]
        updates = [(B, R @ A) for R in cores]
    updates = [(B.to(dtype), A.to(dtype)) for B, A in updates]
    found = compress(updates, 6)
    for B, A in updates:
        R = core_of(found.P, found.Q, (B, A))
        error = torch.linalg.matrix_norm(found.P @ R @ found.Q.mT - B @ A) / torch.linalg.matrix_norm(B @ A)
        assert error < (1e-6 if dtype == torch.float64 else 1e-3)


def test_every_update_counts_the_same_and_one_that_is_zero_does_not() -> None:
    updates = drawn([3, 3, 3])
    found = compress(updates, 2)
    rescaled = compress([(B * 7.0**t, A / 3) for t, (B, A) in enumerate(updates)], 2)
    with_zero = compress([*updates, (torch.zeros(M, 2).double(), torch.randn(2, N).double())], 2)
    for other in (rescaled, with_zero):
        torch.testing.assert_close(other.P @ other.P.mT, found.P @ found.P.mT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_rank_is_at_most_the_span_and_only_the_side_with_less_of_it_is_filled(dtype: torch.dtype) -> None:
    updates = [(B.to(dtype), A.to(dtype)) for B, A in drawn([2, 1])]
    found = compress([*updates, (3 * updates[0][0], updates[0][1])], 8)
    assert found.P.shape == (M, 3)
    assert found.Q.shape == (N, 3)
    assert kept_by(found, updates) == pytest.approx(len(updates), rel=1e-5)
    one_start = [(B, updates[0][1]) for B in torch.randn(3, M, 2, generator=torch.Generator().manual_seed(1)).to(dtype)]
    found = compress(one_start, 8)  # P has six directions, Q two
    assert found.P.shape[1] == found.Q.shape[1] == 6
    assert kept_by(found, one_start) == pytest.approx(len(one_start), rel=1e-5)
    torch.testing.assert_close(found.Q.mT @ found.Q, torch.eye(6, dtype=dtype), atol=1e-5, rtol=0)
    assert compress([(torch.zeros(M, 2), torch.zeros(2, N))], 2).P.shape == (M, 0)


def test_cutting_one_adapter_alone_keeps_what_the_best_ranks_of_its_layers_keep() -> None:
    updates = drawn([4, 3])
    energies, widths = [singular_energies(B, A) for B, A in updates], [M + N, 7]
    for (B, A), found in zip(updates, energies, strict=True):
        torch.testing.assert_close(found, torch.linalg.svdvals(B @ A)[: len(found)] ** 2)
    alone = CutAlone(energies, widths)
    whole = sum(float(own.sum()) for own in energies)
    for size in alone.num_values.tolist():
        ranks = [
            ks for ks in product(range(5), range(4)) if sum(k * w for k, w in zip(ks, widths, strict=True)) <= size
        ]
        best = max(sum(float(own[:k].sum()) for own, k in zip(energies, ks, strict=True)) for ks in ranks)
        assert alone.kept(size) == pytest.approx(best / whole)
    assert alone.kept(6.0) == 0.0


def test_sharing_pays_from_the_first_number_at_which_it_keeps_more() -> None:
    alone = [CutAlone([singular_energies(B, A)], [M + N]) for B, A in drawn([6, 4, 8])]
    for kept, basis, core in ((0.9, 400, 9.0), (0.5, 400, 30.0), (0.99, 1000, 100.0)):
        shares = ((n, sum(one.kept(basis / n + core) for one in alone) / 3) for n in range(1, 10_000))
        first = next((n for n, share in shares if share <= kept + 1e-4), None)
        assert sharing_keeps_more_from(alone, kept, basis, core) == first


def test_four_bits_hold_cores_of_a_few_large_directions_and_would_not_in_singular_coordinates() -> None:
    generator = torch.Generator().manual_seed(0)
    updates = [(torch.randn(80, 1, generator=generator), torch.randn(1, 60, generator=generator)) for _ in range(16)]
    found = compress(updates, 16)
    cores = torch.stack([core_of(found.P, found.Q, one) for one in updates])
    values = torch.linalg.svdvals(cores)

    def lost(of: Tensor) -> float:
        codes, scales = quantise(of.flatten(1), 4)
        back = levels(codes, scales.double().unsqueeze(1), 4).view_as(of)
        return float(((back - of).square().sum((1, 2)) / of.square().sum((1, 2))).mean())

    assert lost(cores) < 0.05
    assert lost(torch.diag_embed(values)) > 0.2


def test_energies_come_from_the_factors() -> None:
    for B, A in drawn([1, 4, 9]):
        assert energy(B, A) == pytest.approx(float((B @ A).square().sum()))


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(CalibrationError, match="NaN or Inf"):
        compress([*drawn([2]), (torch.full((M, 1), torch.nan).double(), torch.ones(1, N).double())], 2)
