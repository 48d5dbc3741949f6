"""The least cost of a job, from shapes: operations (a multiplication or an addition is one) and bytes.

Shapes: a target matrix is (m, n), outputs and inputs; r is the rank; R ranks calibrate together. A token is a position
of a sequence, padding included. Models are decoders of the Llama family: q, k, v, o, gate, up, down, an output layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log2

from frozencore.maths.linalg import GRAM_LIMIT, KRYLOV_BLOCKS, KRYLOV_WIDTH

Shape = tuple[int, int]
FLOAT32_BYTES = 4
KRYLOV_PRODUCTS = 2 * KRYLOV_BLOCKS  # one with M and one with its transpose a block


@dataclass(frozen=True)
class Architecture:
    """The sizes that decide the cost; ``width`` is the hidden size."""

    width: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    head_size: int

    def attention_shapes(self) -> tuple[Shape, Shape, Shape, Shape]:
        """q, k, v and o of one block."""
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return (queries, self.width), (keys, self.width), (keys, self.width), (self.width, queries)

    def mlp_shapes(self) -> tuple[Shape, Shape, Shape]:
        """gate, up and down of one block."""
        return (self.intermediate, self.width), (self.intermediate, self.width), (self.width, self.intermediate)

    def targets(self) -> list[Shape]:
        """Every q, k, v and o."""
        return list(self.attention_shapes()) * self.num_layers

    def block_weights(self) -> int:
        return self.num_layers * entries(self.attention_shapes() + self.mlp_shapes())

    def weights(self) -> int:
        """All of them, embedding and output layer once each; norms and biases left out."""
        return self.block_weights() + 2 * self.vocabulary * self.width


def entries(shapes: Iterable[Shape]) -> int:
    """``Σ mn``."""
    return sum(m * n for m, n in shapes)


def sides(shapes: Iterable[Shape]) -> int:
    """``Σ (m + n)``."""
    return sum(m + n for m, n in shapes)


def pass_operations(model: Architecture, num_tokens: int, sequence: int, num_completion: int) -> int:
    """Forward and backward without weight gradients: ``4`` a weight and token, ``12`` for attention.

    The output layer sees the completion only; attention counts the whole square, as dense kernels compute it.
    """
    attention = 12 * sequence * model.num_heads * model.head_size * model.num_layers
    output = 4 * model.vocabulary * model.width * num_completion
    return num_tokens * (4 * model.block_weights() + attention) + output


def product_operations(shapes: Iterable[Shape], num_tokens: int) -> int:
    """``Σ δxᵀ`` of every target: ``2mn`` a token."""
    return 2 * entries(shapes) * num_tokens


def product_bytes(shapes: Iterable[Shape], num_batches: int) -> int:
    """Each batch reads and writes the float32 sums: ``8mn``."""
    return 2 * FLOAT32_BYTES * entries(shapes) * num_batches


def uses_krylov(shape: Shape, rank: int) -> bool:
    """Whether the randomised SVD is taken, not the exact Gram eigenproblem (``frozencore.maths.linalg``)."""
    return min(shape) > max(GRAM_LIMIT, KRYLOV_WIDTH * KRYLOV_BLOCKS * rank)


def svd_operations(shape: Shape, rank: int) -> int:
    """Krylov: twelve products with 2r columns, ``48mnr``, and the orthogonalisation of 12r columns.

    Gram: ``2mn·min`` for the matrix and about ``9 min³`` for its eigenvectors.
    """
    m, n = shape
    if uses_krylov(shape, rank):
        width = KRYLOV_WIDTH * rank
        products = KRYLOV_PRODUCTS * 2 * m * n * width
        again = 2 * 4 * n * width**2 * sum(range(1, KRYLOV_BLOCKS))
        return products + again + 4 * m * (KRYLOV_BLOCKS * width) ** 2
    return 2 * m * n * min(shape) + 9 * min(shape) ** 3


def core_operations(shapes: Iterable[Shape], rank: int, num_tokens: int) -> int:
    """A core's share of a step, forward and backward: ``4r(m + n) + 6r²`` a token."""
    return num_tokens * sum(4 * rank * (m + n) + 6 * rank**2 for m, n in shapes)


def lora_operations(shapes: Iterable[Shape], rank: int, num_tokens: int) -> int:
    """LoRA's share of a step: ``6r(m + n)`` a token."""
    return num_tokens * 6 * rank * sides(shapes)


def sent_by_formula(shapes: Iterable[Shape], rank: int, num_ranks: int) -> float:
    """Bytes that a rank sends in one calibration, on average over the ranks, at least.

    A sum that one rank is to hold crosses R - 1 links, a broadcast as many, a sum for all twice as many; so with
    ``(R - 1)/R`` before it: ``4mn`` for G to its owner, ``2·(4m + 4n + 8)`` for d, a and the count, and
    ``4r(m + n + 1) + 24`` for P, Q, the spectrum and its head from the owner.
    """
    shapes = list(shapes)
    to_owner = FLOAT32_BYTES * entries(shapes)
    to_all = 2 * (FLOAT32_BYTES * sides(shapes) + 8 * len(shapes))
    from_owner = FLOAT32_BYTES * rank * (sides(shapes) + len(shapes)) + 24 * len(shapes)
    return (num_ranks - 1) / num_ranks * (to_owner + to_all + from_owner)


def num_rounds(num_ranks: int) -> int:
    """Messages one after the other in a tree over the ranks."""
    return ceil(log2(num_ranks)) if num_ranks > 1 else 0
