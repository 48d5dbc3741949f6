"""An estimate from one pass does what T was seen to do, and passes after one another find what T has to show."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from frozencore.maths.one_pass import from_one_pass, svd_of_product
from references import numpy_of, principal_cosines, svd

SHAPE, K = (60, 50), 8


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_spectrum(values: Tensor, shape: tuple[int, int]) -> Tensor:
    U, V = (torch.linalg.qr(drawn(size, len(values), seed=size)).Q for size in shape)
    return U * values @ V.mT


def test_the_estimate_does_to_the_tests_what_the_matrix_does() -> None:
    T, U, V = drawn(*SHAPE), drawn(SHAPE[0], K, seed=1), drawn(SHAPE[1], K, seed=2)
    L, R = from_one_pass(T @ V, T.mT @ U, U, V)
    assert (L.shape[1], R.shape[1]) == (2 * K, 2 * K)
    torch.testing.assert_close(L @ (R.mT @ V), T @ V)
    torch.testing.assert_close(R @ (L.mT @ U), T.mT @ U)


@pytest.mark.parametrize("side", ["U", "V"])
def test_a_matrix_inside_one_of_the_spans_is_found_whole(side: str) -> None:
    """On the other side the tests may be anything."""
    T = drawn(SHAPE[0], K, seed=3) @ drawn(K, SHAPE[1], seed=4)
    U, _, Vh = torch.linalg.svd(T, full_matrices=False)
    tests = {"U": drawn(SHAPE[0], K, seed=1), "V": drawn(SHAPE[1], K, seed=2)}
    tests |= {"U": U[:, :K]} if side == "U" else {"V": Vh[:K].mT}
    L, R = from_one_pass(T @ tests["V"], T.mT @ tests["U"], tests["U"], tests["V"])
    torch.testing.assert_close(L @ R.mT, T)
    found, (left, values, _) = svd_of_product((L, R), 5), svd(numpy_of(T))
    np.testing.assert_allclose(numpy_of(found.S), values[:5], rtol=1e-9)
    assert principal_cosines(numpy_of(found.U), left[:, :5]).min() > 1 - 1e-9


def test_it_depends_on_the_spans_of_the_tests_alone() -> None:
    T, U, V = drawn(*SHAPE), drawn(SHAPE[0], K, seed=1), drawn(SHAPE[1], K, seed=2)
    mixed_U, mixed_V = U @ drawn(K, K, seed=3), V @ drawn(K, K, seed=4)
    plain = from_one_pass(T @ V, T.mT @ U, U, V)
    mixed = from_one_pass(T @ mixed_V, T.mT @ mixed_U, mixed_U, mixed_V)
    torch.testing.assert_close(mixed[0] @ mixed[1].mT, plain[0] @ plain[1].mT)


def test_a_matrix_of_zeros_is_estimated_as_zeros() -> None:
    U, V = drawn(SHAPE[0], K, seed=1), drawn(SHAPE[1], K, seed=2)
    L, R = from_one_pass(torch.zeros_like(U), torch.zeros_like(V), U, V)
    assert not (L @ R.mT).any()


@pytest.mark.parametrize(("exponent", "first", "share"), [(0.3, 0.5, 0.9), (0.5, 0.5, 0.99), (1.0, 0.85, 0.999)])
def test_passes_along_what_the_pass_before_found_come_near_the_best_of_hard_spectra(
    exponent: float, first: float, share: float
) -> None:
    """Rank 4 in 11 columns, 160 x 140, of the energy of the four best triples after eight passes; the first has random
    tests."""
    r, k = 4, 11
    values = torch.arange(1, 141, dtype=torch.float64) ** -exponent
    T = with_spectrum(values, (160, 140))
    U, V = (torch.linalg.qr(drawn(size, k, seed=9)).Q for size in T.shape)
    shares = []
    for _ in range(8):
        found = svd_of_product(from_one_pass(T @ V, T.mT @ U, U, V), k)
        U, V = found.U, found.V
        captured = torch.linalg.norm(U[:, :r].mT @ T @ V[:, :r]) ** 2
        shares.append(float(captured / (values[:r] ** 2).sum()))
    assert shares[0] < first
    assert shares[-1] > share
