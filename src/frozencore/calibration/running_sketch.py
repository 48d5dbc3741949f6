"""Sketch one layer for bases that are renewed during training, from batches that are seen once
(:mod:`frozencore.maths.one_pass`). No m x n matrix is held.

    Y = Σ D^-1/2 δ (Vᵀ A^-1/2 x)ᵀ = T V,   Z = Σ A^-1/2 x (Uᵀ D^-1/2 δ)ᵀ = Tᵀ U

The test matrices U and V and the metric come from the previous round. In the first round U and V are random, in the
metric of the first batches. The best rank-k approximation of the previous sums is kept and added to the new round.

Shapes: m outputs, n inputs, k columns of a sketch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from frozencore.maths.linalg import Shape, TruncatedSVD, seeded_generator
from frozencore.maths.moments import LayerMoments
from frozencore.maths.one_pass import from_one_pass, svd_of_product
from frozencore.maths.sums import add_outer, projected
from frozencore.maths.whitening import Whitening

TESTS = torch.bfloat16  # the rounded matrices are still valid tests, though not exactly orthonormal


@dataclass(frozen=True)
class Tests:
    """The factors ``left = D^-1/2 U`` (m x k) and ``right = A^-1/2 V`` (n x k), and the diagonals of the two roots."""

    left: Float[Tensor, "m k"]
    right: Float[Tensor, "n k"]
    error_root: Float[Tensor, "m 1"]
    input_root: Float[Tensor, "n 1"]


class RunningSketch:
    """The sketch of one layer; it sums nothing until it has test matrices.

    Attributes:
        tests: None until a metric is known.
        images: The sums that give Y and Z once they are whitened: ``D^1/2 Y`` (m x k) and ``A^1/2 Z`` (n x k).
    """

    def __init__(self, shape: Shape, width: int, whitening: Whitening) -> None:
        self.shape, self.whitening = shape, whitening
        self.width = min(width, *shape)
        self.tests: Tests | None = None
        self.images: tuple[Tensor, Tensor] | None = None

    def begin(self, diagonals: LayerMoments, device: torch.device) -> None:
        """Draw random tests in the metric of the second moments so far."""
        generator = seeded_generator(0, "running sketch", *self.shape)
        U, V = (torch.randn(size, self.width, generator=generator).to(device) for size in self.shape)
        self._take_tests(
            torch.linalg.qr(U).Q, torch.linalg.qr(V).Q, *self.whitening.diagonal_roots(diagonals, self.shape, U)
        )
        self.images = torch.zeros_like(U), torch.zeros_like(V)

    def add(self, error: Float[Tensor, "N m"], values: Float[Tensor, "N n"]) -> None:
        """Add the counted tokens of one call."""
        if self.tests is None or self.images is None:
            return
        of_errors, of_values = self.images
        add_outer(of_errors, error, projected(values, self.tests.right).to(error.dtype))
        add_outer(of_values, values, projected(error, self.tests.left).to(values.dtype))

    def next_round(self, diagonals: LayerMoments, rank: int, share: float) -> TruncatedSVD:
        """Find the ``rank`` leading singular triples of T, and start the sums of the next round.

        T is a sum over tokens, in the metric of ``diagonals``. If T is zero there are no triples. The new sums start as
        ``share`` of the best approximation of T, and the new tests are its directions.

        Args:
            diagonals: The second moments over the same tokens as ``images``.
        """
        assert self.tests is not None
        assert self.images is not None
        old, (of_errors, of_values) = self.tests, self.images
        if not of_errors.any():
            m, n = self.shape
            return TruncatedSVD(of_errors.new_zeros(m, 0), of_errors.new_zeros(0), of_errors.new_zeros(n, 0))
        L, R = from_one_pass(
            of_errors * old.error_root,
            of_values * old.input_root,
            old.left.float() / old.error_root,
            old.right.float() / old.input_root,
        )
        roots = self.whitening.diagonal_roots(diagonals, self.shape, of_errors)
        U, S, V = svd_of_product((L * (roots[0] / old.error_root), R * (roots[1] / old.input_root)), self.width)
        del L, R
        self._take_tests(U, V, *roots)
        tests: Tests = self.tests
        self.images = (
            U @ (share * S[:, None] * (V.mT @ (tests.right.float() / roots[1]))) / roots[0],
            V @ (share * S[:, None] * (U.mT @ (tests.left.float() / roots[0]))) / roots[1],
        )
        return TruncatedSVD(U[:, :rank].clone(), S[:rank].clone(), V[:, :rank].clone())

    def state(self) -> dict[str, Tensor]:
        """The sketch's tensors by name, for saving."""
        if self.tests is None or self.images is None:
            return {}
        return {**vars(self.tests), "of_errors": self.images[0], "of_values": self.images[1]}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a sketch from :meth:`state`."""
        if state:
            self.images = state["of_errors"], state["of_values"]
            self.tests = Tests(**{name: state[name] for name in Tests.__dataclass_fields__})

    def _take_tests(self, U: Tensor, V: Tensor, error_root: Tensor, input_root: Tensor) -> None:
        self.tests = Tests((U * error_root).to(TESTS), (V * input_root).to(TESTS), error_root, input_root)


def sketch_bytes(shape: Shape, width: int) -> tuple[int, int]:
    """The bytes of a sketch with a and d while it sums, and the extra bytes of :meth:`RunningSketch.next_round`.

    Sums take four bytes a value, tests two, the two diagonals and their roots four each.
    """
    m, n = shape
    k = min(width, m, n)
    return (6 * k + 8) * (m + n), 32 * k * (m + n)
