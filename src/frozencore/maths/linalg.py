"""The linear algebra under every basis: truncated SVD, thin QR, PSD roots, principal angles.

Letters: M any m x n matrix, r the rank, U Σ Vᵀ its SVD. Every result is deterministic: signs are canonical,
random starts have a separate generator, and the global RNG is never touched.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, assert_never

from jaxtyping import Float

from frozencore.device import torch
from frozencore.errors import CalibrationError, ConfigError

SvdMethod = Literal["auto", "gram", "randomized", "full"]
Triples = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""U, S and V."""

GRAM_LIMIT = 256  # up to this min(m, n) the exact Gram eigenproblem is faster; at 384 it takes twice as long
KRYLOV_WIDTH, KRYLOV_BLOCKS = 2, 6  # the randomised SVD's block is 2r wide; six blocks span its space
RANK_TOLERANCE = 1e-6  # a singular value below this share of the largest one is noise


class TruncatedSVD(NamedTuple):
    """The r leading singular triples of an m x n matrix, largest first, with canonical signs."""

    U: Float[torch.Tensor, "m r"]
    S: Float[torch.Tensor, " r"]
    V: Float[torch.Tensor, "n r"]


def seeded_generator(seed: int, *labels: str | int) -> torch.Generator:
    """Make a CPU generator for one named purpose, so that no draw depends on the order of other draws.

    >>> torch.equal(*(torch.randn(3, generator=seeded_generator(0, "layer", "q_proj")) for _ in range(2)))
    True
    """
    digest = hashlib.sha256("\x1f".join(str(part) for part in (seed, *labels)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def fitting_rank(rank: int, shape: Iterable[int]) -> int:
    """The rank, or the most that a matrix of this shape has.

    Raises:
        ConfigError: The rank is less than 1.
    """
    if rank < 1:
        raise ConfigError(f"A rank is 1 or more, but {rank} was given.")
    return min(rank, *shape)


def truncated_svd(
    M: Float[torch.Tensor, "m n"], rank: int, *, method: SvdMethod = "auto", seed: int = 0
) -> TruncatedSVD:
    """The ``min(rank, m, n)`` leading singular triples of ``M``.

    Args:
        method: ``gram`` solves the float64 eigenproblem of the smaller Gram matrix (exact); ``randomized`` takes the
            best of a block Krylov space, six blocks of 2r directions; ``full`` is LAPACK's SVD; ``auto`` is
            ``gram`` where min(m, n) is at most 256 or 12r, and ``randomized`` above.
        seed: Seed of the random start of ``randomized``.

    Raises:
        CalibrationError: ``M`` is not finite.

    >>> U, S, V = truncated_svd(torch.diag(torch.tensor([1.0, 3.0, 2.0])), rank=2)
    >>> S.tolist(), U.abs().argmax(0).tolist()
    ([3.0, 2.0], [1, 2])
    """
    require_finite(M)
    rank = fitting_rank(rank, M.shape)
    if method == "auto":
        method = "randomized" if prefers_krylov(M, rank) else "gram"
    if method == "gram":
        U, S, V = _gram_svd(M, rank)
    elif method == "randomized":
        U, S, V = _randomized_svd(M, rank, seed)
    elif method == "full":
        U, S, Vh = torch.linalg.svd(M, full_matrices=False)
        U, S, V = U[:, :rank], S[:rank], Vh[:rank].mT
    else:
        assert_never(method)
    return TruncatedSVD(*canonical_signs(U, S, V))


def all_finite(M: torch.Tensor) -> bool:
    """Return whether no entry is NaN or Inf; ``isfinite`` on each entry would take one and a half times M's memory."""
    return M.numel() == 0 or all(math.isfinite(float(end)) for end in torch.aminmax(M))


def require_finite(M: torch.Tensor, name: str = "A matrix to factorise") -> None:
    """Refuse NaN and Inf: a factorisation would fail in LAPACK's words or return a plausible result."""
    if not all_finite(M):
        raise CalibrationError(f"{name} has NaN or Inf. Check the model's weights and the calibration data.")


def trailing_svd(M: Float[torch.Tensor, "m n"], rank: int) -> TruncatedSVD:
    """The ``min(rank, m, n)`` smallest singular triples of ``M``, the largest of them first, in float64.

    Raises:
        CalibrationError: ``M`` is not finite.
    """
    require_finite(M)
    M, rank = M.double(), fitting_rank(rank, M.shape)
    U, S, V = _gram_svd(M, rank, smallest=True)
    if S[-1] <= RANK_TOLERANCE * torch.linalg.matrix_norm(M):  # a Gram matrix does not separate such directions
        U, S, Vh = torch.linalg.svd(M, full_matrices=False)
        U, S, V = U[:, -rank:], S[-rank:], Vh[-rank:].mT
    return TruncatedSVD(*canonical_signs(U, S, V))


def _gram_svd(M: torch.Tensor, rank: int, *, smallest: bool = False) -> Triples:
    if M.shape[0] > M.shape[1]:
        V, S, U = _gram_svd(M.mT, rank, smallest=smallest)
        return U, S, V
    X = M.double()
    vectors = torch.linalg.eigh(X @ X.mT).eigenvectors
    U = (vectors[:, :rank] if smallest else vectors[:, -rank:]).flip(1)
    # Squaring loses directions below 1e-8 of the largest; an SVD of the projection recovers their scale.
    W, S, Vh = torch.linalg.svd(U.mT @ X, full_matrices=False)
    return (U @ W).to(M.dtype), S.to(M.dtype), Vh.mT.to(M.dtype)


def _randomized_svd(M: torch.Tensor, rank: int, seed: int) -> Triples:
    """Block Golub-Kahan: the best triples in the Krylov space of ``MᵀM`` over a random start (Musco and Musco, 2015).

    It keeps all blocks, and so takes half the time of subspace iteration (twice the width, 17 products) at the same
    accuracy.
    """
    width, num_blocks = KRYLOV_WIDTH * rank, KRYLOV_BLOCKS
    if width * num_blocks > min(M.shape):
        width, num_blocks = min(M.shape), 1  # the whole space in one block
    generator = seeded_generator(seed, "svd", *M.shape)
    start = torch.randn(M.shape[0], width, generator=generator, dtype=torch.float32, device="cpu")
    # V: an orthonormal basis of the space, block after block; images: M V
    V = torch.linalg.qr(_times(M, start.to(M.device, M.dtype))).Q
    images = [M @ V]
    for _ in range(num_blocks - 1):
        block = _new_directions(_times(M, torch.linalg.qr(images[-1]).Q), V)
        V = torch.cat([V, block], dim=1)
        images.append(M @ block)
    image = torch.cat(images, dim=1)
    if (V.mT @ V - torch.eye(V.shape[1], dtype=V.dtype, device=V.device)).abs().max() > 1e-5:
        V = torch.linalg.qr(V).Q  # a matrix of low rank has no new directions: its blocks repeat old ones
        image = M @ V
    # the SVD of M inside the space: of the small T, where M V = U T
    U, T = torch.linalg.qr(image)
    left, S, right = torch.linalg.svd(T, full_matrices=False)
    return U @ left[:, :rank], S[:rank], V @ right[:rank].mT


def _times(M: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
    """``Mᵀ X``; transposed twice, because BLAS is up to three times faster without transposing M."""
    return (X.mT @ M).mT


def _new_directions(X: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns for the part of X outside the span of an orthonormal basis."""
    for _ in range(2):  # a second pass of Gram-Schmidt removes the round-off of the first
        X = torch.linalg.qr(X - basis @ (basis.mT @ X)).Q
    return X


def canonical_signs(U: torch.Tensor, S: torch.Tensor, V: torch.Tensor) -> Triples:
    """Flip singular pairs so that the largest entry of each left vector is positive."""
    largest = U.gather(-2, U.abs().argmax(-2, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(U.dtype)
    return U * signs, S, V * signs.to(V.dtype)


def thin_qr(X: Float[torch.Tensor, "m r"]) -> tuple[Float[torch.Tensor, "m r"], Float[torch.Tensor, "r r"]]:
    """Thin QR ``X = Q T`` with a positive diagonal of T, which makes it unique at full rank.

    >>> Q, T = thin_qr(torch.tensor([[-3.0], [-4.0]]))
    >>> round(T.item(), 6)
    5.0
    """
    Q, T = torch.linalg.qr(X)
    signs = torch.where(T.diagonal() < 0, -1.0, 1.0).to(X.dtype)
    return Q * signs, T * signs[:, None]


def complete_orthonormal(
    X: Float[torch.Tensor, "m k"], rank: int, generator: torch.Generator
) -> Float[torch.Tensor, "m r"]:
    """Extend k independent columns to ``rank`` with seeded random directions, orthonormal and orthogonal to them."""
    missing = rank - X.shape[1]
    if missing <= 0:
        return X
    extra = torch.randn(X.shape[0], missing, generator=generator, dtype=torch.float64, device="cpu").to(X.device)
    basis = thin_qr(X.double())[0]  # raw coordinates are not orthonormal
    for _ in range(2):  # a second pass of Gram-Schmidt removes the round-off of the first
        extra = thin_qr(extra - basis @ (basis.mT @ extra))[0]
    return torch.cat([X, extra.to(X.dtype)], dim=1)


def top_eigenvectors(
    A: Float[torch.Tensor, "n n"], rank: int
) -> tuple[Float[torch.Tensor, "n r"], Float[torch.Tensor, " r"]]:
    """Eigenvectors and eigenvalues of a symmetric PSD matrix, largest first, with canonical signs.

    Large matrices use the randomised SVD, which takes a third of the time at n = 512 and less above.
    """
    require_finite(A)
    if prefers_krylov(A, rank):
        top, values, _ = truncated_svd(A, rank)
        return top, values
    eigenvalues, vectors = torch.linalg.eigh(A.double())
    top = vectors[:, -rank:].flip(1)
    values = eigenvalues[-rank:].flip(0).clamp_min(0)
    top, _, _ = canonical_signs(top, values, top)
    return top.to(A.dtype), values.to(A.dtype)


def prefers_krylov(M: torch.Tensor, rank: int) -> bool:
    """Return whether the Krylov space is faster for this rank."""
    return min(M.shape) > max(GRAM_LIMIT, KRYLOV_WIDTH * KRYLOV_BLOCKS * rank)


def inverse_root(A: Float[torch.Tensor, "n n"], smallest: float) -> Float[torch.Tensor, "n n"]:
    """``A^-1/2`` of a symmetric positive definite matrix, in float64.

    Args:
        smallest: A lower bound of the true eigenvalues, the damping of ``A``. Eigenvalues below it, from rounding, are
            raised to it.

    >>> inverse_root(torch.diag(torch.tensor([4.0, 16.0])), smallest=1e-6).diagonal().tolist()
    [0.5, 0.25]
    """
    eigenvalues, vectors = torch.linalg.eigh(A.double())
    return (vectors * eigenvalues.clamp_min(smallest).rsqrt()) @ vectors.mT


def principal_cosines(X: Float[torch.Tensor, "m p"], Y: Float[torch.Tensor, "m q"]) -> Float[torch.Tensor, " k"]:
    """Cosines of the principal angles between two column spans, largest first, in [0, 1].

    >>> X = torch.eye(3)
    >>> principal_cosines(X[:, :2], X[:, 1:]).tolist()
    [1.0, 0.0]
    """
    QX, _ = torch.linalg.qr(X.double())
    QY, _ = torch.linalg.qr(Y.double())
    return torch.linalg.svdvals(QX.mT @ QY).clamp_max(1)


def energy_rank(energy: Float[torch.Tensor, " r"]) -> int:
    """The effective rank of a second moment from its eigenvalues, the squares of singular values.

    An eigenvalue below the rounding error of the sums does not count.
    """
    if energy.numel() == 0:
        return 0
    return int((max(RANK_TOLERANCE**2, torch.finfo(energy.dtype).eps) * energy[0] < energy).sum())


def effective_rank(S: Float[torch.Tensor, " r"]) -> int:
    """The number of singular values above ``1e-6`` of the largest one; zero for a zero matrix.

    >>> effective_rank(torch.tensor([2.0, 1.0, 1e-9]))
    2
    """
    if S.numel() == 0:
        return 0
    return int((RANK_TOLERANCE * S[0] < S).sum())
