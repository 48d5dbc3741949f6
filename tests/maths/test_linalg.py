"""linalg against NumPy in float64, and against the table of SVD methods in the test below."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import references as ref
from frozencore import lora_xs_basis, milora_basis
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.linalg import (
    SvdMethod,
    all_finite,
    complete_orthonormal,
    effective_rank,
    energy_rank,
    inverse_root,
    principal_cosines,
    seeded_generator,
    thin_qr,
    top_eigenvectors,
    trailing_svd,
    truncated_svd,
)


def random_matrix(m: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=(m, n)), dtype=dtype)


def decaying(m: int, n: int, exponent: float, seed: int, rank: int | None = None) -> torch.Tensor:
    """Singular values i^-exponent under random singular vectors, none beyond ``rank``: without a gap to hold on to."""
    rng = np.random.default_rng(seed)
    k = min(m, n) if rank is None else rank
    U, V = (np.linalg.qr(rng.normal(size=(width, k)))[0] for width in (m, n))
    return torch.tensor(U * np.arange(1.0, k + 1) ** -exponent @ V.T, dtype=torch.float32)


@pytest.mark.parametrize("shape", [(9, 7), (7, 9), (8, 8), (5, 1), (1, 5)])
@pytest.mark.parametrize("method", get_args(SvdMethod))
def test_every_svd_method_equals_the_full_svd(method: str, shape: tuple[int, int]) -> None:
    M = random_matrix(*shape)
    U, S, V = (ref.numpy_of(part) for part in truncated_svd(M, 4, method=method))
    _, expected, _ = ref.svd(ref.numpy_of(M))
    rank = min(4, *shape)
    np.testing.assert_allclose(S, expected[:rank], rtol=1e-10)
    np.testing.assert_allclose(U * S @ V.T, ref.truncated(ref.numpy_of(M), rank), atol=1e-9)
    np.testing.assert_allclose(U.T @ U, np.eye(rank), atol=1e-12)
    np.testing.assert_allclose(V.T @ V, np.eye(rank), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", get_args(SvdMethod))
def test_every_svd_has_the_matrixs_dtype_canonical_signs_and_the_same_bytes_each_time(
    method: str, dtype: torch.dtype
) -> None:
    M, before = random_matrix(40, 30, dtype=dtype), torch.get_rng_state()
    found, again, minus = (truncated_svd(X, 4, method=method, seed=5) for X in (M, M, -M))
    assert torch.equal(before, torch.get_rng_state())
    assert {part.dtype for part in found} == {dtype}
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    assert all(column[column.abs().argmax()] > 0 for column in found.U.T)
    atol = 1e-10 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found.U, minus.U, atol=atol, rtol=0)
    torch.testing.assert_close(found.V, -minus.V, atol=atol, rtol=0)


def test_gram_svd_finds_small_directions_that_squaring_alone_would_lose() -> None:
    rng = np.random.default_rng(0)
    U, V = np.linalg.qr(rng.normal(size=(12, 6)))[0], np.linalg.qr(rng.normal(size=(9, 6)))[0]
    values = np.array([1.0, 1e-2, 1e-4, 1e-5, 2e-6, 1e-8])  # below 1e-6 of the first, a direction is noise
    found = truncated_svd(torch.tensor(U * values @ V.T), 5, method="gram")
    np.testing.assert_allclose(ref.numpy_of(found.S), values[:5], rtol=1e-6)


@cache
def decomposed(exponent: float, seed: int) -> tuple[torch.Tensor, ref.Array, ref.Array]:
    M = decaying(640, 560, exponent, seed)
    U, _, V = ref.svd(ref.numpy_of(M))
    return M, U, V


@pytest.mark.parametrize(("method", "at_least"), [("randomized", 0.9999), ("gram", 0.999999)])
@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_truncated_svd_keeps_the_quality_table_of_the_maths(method: str, at_least: float, exponent: float) -> None:
    """Rank 16, hard slowly decaying spectra, mean principal cosine against the full SVD in float64."""
    for seed in range(3):
        M, U_ref, V_ref = decomposed(exponent, seed)
        found = truncated_svd(M, 16, method=method, seed=seed)
        for X, X_ref in ((found.U, U_ref), (found.V, V_ref)):
            assert ref.principal_cosines(ref.numpy_of(X), X_ref[:, :16]).mean() >= at_least


def whitened_noise(num_tokens: int, seed: int) -> torch.Tensor:
    """A 300 x 280 cross moment of inputs and errors that have nothing to do with one another, whitened."""
    rng = np.random.default_rng(seed)
    errors, inputs = rng.normal(size=(num_tokens, 300)), rng.normal(size=(num_tokens, 280))
    scales = np.sqrt((errors**2).mean(0))[:, None] * np.sqrt((inputs**2).mean(0))
    return torch.tensor(errors.T @ inputs / num_tokens / scales, dtype=torch.float32)


@pytest.mark.parametrize(("rank", "least_energy"), [(1, 0.9), (4, 0.98), (16, 0.9999)])
def test_the_randomized_svd_keeps_the_energy_of_a_whitened_matrix_without_a_gap(rank: int, least_energy: float) -> None:
    for seed in range(4):
        T = whitened_noise(64 if seed % 2 else 2000, seed)
        found = truncated_svd(T, rank, seed=seed)
        best = float(torch.linalg.svdvals(T.double())[:rank].square().sum())
        assert least_energy * best <= float((found.U.mT @ T @ found.V).square().sum()) <= (1 + 1e-5) * best


@pytest.mark.parametrize(
    ("shape", "rank", "method"),
    [
        ((256, 300), 16, "gram"), ((257, 300), 16, "randomized"),
        ((300, 320), 25, "gram"), ((300, 320), 24, "randomized"),  # six blocks of 2r = 50 would be the whole space
    ],
)  # fmt: skip
def test_auto_is_exact_where_it_is_faster(shape: tuple[int, int], rank: int, method: str) -> None:
    M = decaying(*shape, 0.5, 0)
    assert torch.equal(truncated_svd(M, rank).U, truncated_svd(M, rank, method=method).U)


@pytest.mark.parametrize("true_rank", [0, 1, 5, 40])
def test_the_randomized_svd_keeps_its_factors_orthonormal_where_the_matrix_has_no_more_directions(
    true_rank: int,
) -> None:
    M = random_matrix(300, true_rank, 0, torch.float32) @ random_matrix(true_rank, 280, 1, torch.float32)
    U, S, V = truncated_svd(M, 16, method="randomized")
    assert effective_rank(S) == min(true_rank, 16)
    for X in (U, V):
        torch.testing.assert_close(X.mT @ X, torch.eye(16), rtol=0, atol=1e-5)
    expected = torch.linalg.svdvals(M.double())[:16]
    torch.testing.assert_close(S.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("as_a_user")
def test_an_unknown_svd_method_is_refused() -> None:
    with pytest.raises(AssertionError, match="'magic'"):
        truncated_svd(torch.eye(3), 2, method="magic")


@given(m=st.integers(1, 15), r=st.integers(1, 6), seed=st.integers(0, 1000))
def test_thin_qr_reproduces_its_matrix_with_a_positive_triangular_factor(m: int, r: int, seed: int) -> None:
    m = max(m, r)
    X = random_matrix(m, r, seed)
    Q, T = thin_qr(X)
    torch.testing.assert_close(Q @ T, X, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(r, dtype=Q.dtype), atol=1e-12, rtol=0)
    assert bool((T.diagonal() > 0).all())
    assert torch.equal(T, T.triu())


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_completion_is_orthonormal_seeded_and_keeps_what_was_there(k: int) -> None:
    X = torch.linalg.qr(random_matrix(8, 8))[0][:, :k]
    full = complete_orthonormal(X, 8, seeded_generator(3, "test"))
    assert torch.equal(full[:, :k], X)
    torch.testing.assert_close(full.mT @ full, torch.eye(8, dtype=full.dtype), atol=1e-12, rtol=0)
    assert torch.equal(full, complete_orthonormal(X, 8, seeded_generator(3, "test")))
    assert complete_orthonormal(X.float(), 8, seeded_generator(3, "test")).dtype == torch.float32
    if k < 7:  # the last direction of eight has no freedom but its sign
        assert not torch.allclose(full, complete_orthonormal(X, 8, seeded_generator(4, "test")))


@pytest.mark.parametrize("size", [9, 300])
def test_top_eigenvectors_keep_the_dtype_and_never_fall_below_zero(size: int) -> None:
    """A second moment of fewer tokens than inputs; float32 sums put its zero eigenvalues beside zero."""
    X = random_matrix(4, size, dtype=torch.float32)
    vectors, values = top_eigenvectors(X.mT @ X, 8)
    assert vectors.dtype == values.dtype == torch.float32
    assert float(values.min()) >= 0
    np.testing.assert_allclose(ref.numpy_of(vectors.mT @ vectors), np.eye(8), atol=1e-5)
    assert all(column[column.abs().argmax()] > 0 for column in vectors.T)


@pytest.mark.parametrize(
    ("B", "rank", "tolerance"), [(random_matrix(9, 9), 4, 1e-10), (decaying(400, 400, 0.5, 0), 16, 1e-3)]
)
def test_top_eigenvectors_equal_numpys(B: torch.Tensor, rank: int, tolerance: float) -> None:
    A = B @ B.mT
    vectors, values = top_eigenvectors(A, rank)
    expected = np.sort(np.linalg.eigvalsh(ref.numpy_of(A)))[::-1][:rank]
    np.testing.assert_allclose(ref.numpy_of(values), expected, rtol=tolerance)
    assert ref.span_distance(ref.numpy_of(vectors), ref.top_eigenspace(ref.numpy_of(A), rank)) < tolerance


def test_the_inverse_root_whitens() -> None:
    B = random_matrix(7, 7)
    A = B @ B.mT + 0.1 * torch.eye(7, dtype=torch.float64)
    root = inverse_root(A, 1e-12)
    torch.testing.assert_close(root @ A @ root, torch.eye(7, dtype=torch.float64), atol=1e-10, rtol=0)


def test_principal_cosines_of_a_known_angle() -> None:
    angle = 0.3
    X = torch.eye(4)[:, :2]
    Y = torch.stack([torch.tensor([1.0, 0, 0, 0]), torch.tensor([0, np.cos(angle), np.sin(angle), 0]).float()], dim=1)
    np.testing.assert_allclose(principal_cosines(X, Y).numpy(), [1.0, np.cos(angle)], atol=1e-7)


def test_a_span_and_itself_in_other_coordinates_have_cosines_of_one_and_never_more() -> None:
    for seed in range(20):
        X = random_matrix(9, 4, seed)
        cosines = principal_cosines(X.float(), (X @ random_matrix(4, 4, seed + 1)).float())
        assert cosines.dtype == torch.float64
        assert float(cosines.max()) <= 1
        np.testing.assert_allclose(cosines.numpy(), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "rank"),
    [([], 0), ([0.0, 0.0], 0), ([2.0, 1.0], 2), ([1.0, 1e-5, 1e-7], 2), ([1.0, 1e-6], 1), ([1e3, 1e-2, 1e-4], 2)],
)
def test_effective_rank_counts_values_above_a_millionth_of_the_largest(values: list[float], rank: int) -> None:
    assert effective_rank(torch.tensor(values, dtype=torch.float64)) == rank


@pytest.mark.parametrize(
    ("energy", "dtype", "rank"),
    [
        ([], torch.float64, 0), ([0.0, 0.0], torch.float64, 0), ([4.0, 1.0], torch.float64, 2),
        ([1.0, 1e-11, 1e-12, 1e-13], torch.float64, 2),  # squares: a millionth, squared
        ([1e3, 1e-8, 1e-10], torch.float64, 2),
        ([1.0, 1e-6, 1e-8], torch.float32, 2),  # sums in float32 are rounded at 1e-7
    ],
)  # fmt: skip
def test_energy_rank_counts_squares_above_the_noise_of_their_dtype(
    energy: list[float], dtype: torch.dtype, rank: int
) -> None:
    assert energy_rank(torch.tensor(energy, dtype=dtype)) == rank


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_entry_that_is_not_finite_is_found_and_refused_before_any_factorisation(bad: float) -> None:
    M = random_matrix(5, 5)
    assert all_finite(M)
    assert all_finite(M[:, :0])
    M[2, 3] = bad
    assert not all_finite(M)
    for factorise in (lambda: truncated_svd(M, 2), lambda: top_eigenvectors(M, 2)):
        with pytest.raises(CalibrationError, match="has NaN or Inf. Check the model's weights"):
            factorise()


def test_generators_of_different_purposes_draw_differently() -> None:
    draws = {
        float(torch.rand((), generator=seeded_generator(seed, *labels)))
        for seed in (0, 1)
        for labels in ((), ("a",), ("b",), ("a", 1), ("a1",))
    }
    assert len(draws) == 10


@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("take", [truncated_svd, trailing_svd, lora_xs_basis, milora_basis])
def test_a_rank_below_one_is_refused(take: Callable[[torch.Tensor, int], object], rank: int) -> None:
    """A slice of the last 0 columns would be all of them."""
    with pytest.raises(ConfigError, match=f"A rank is 1 or more, but {rank} was given"):
        take(torch.eye(5), rank)
