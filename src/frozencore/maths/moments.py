"""Moments of one layer: the statistics that a calibration pass collects for a weight matrix (paper, section 3.1).

For the input x (n) and the backpropagated output error δ = ∂loss/∂y (m) of every counted token:
``G = E[δxᵀ]``, ``a = E[x⊙x]``, ``d = E[δ⊙δ]``; on request dense ``A = E[xxᵀ]``, ``D = E[δδᵀ]``, the input mean,
and moments of the output y. The raw sums and the token count are stored; means are derived.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Literal, get_args

from jaxtyping import Float

from frozencore.device import torch
from frozencore.errors import CalibrationError
from frozencore.maths.linalg import require_finite

MomentName = Literal[
    "cross", "input_square", "error_square", "input_outer", "error_outer", "input_total", "output_outer",
    "output_total",
]  # fmt: skip
DenseMoment = Literal["input_outer", "error_outer", "output_outer"]
MOMENT_NAMES: tuple[MomentName, ...] = get_args(MomentName)
DIAGONAL_OF: dict[MomentName, DenseMoment] = {"input_square": "input_outer", "error_square": "error_outer"}
"""The vectors of second moments, and the matrices whose diagonals they are."""
DIAGONALS: frozenset[MomentName] = frozenset(DIAGONAL_OF)
BACKWARD_MOMENTS: frozenset[MomentName] = frozenset({"cross", "error_square", "error_outer"})


@dataclass(frozen=True)
class LayerMoments:
    """Sums over the counted tokens of one layer with m outputs and n inputs.

    Attributes:
        num_tokens: Tokens that were counted.
        cross: ``Σ δxᵀ``, m x n.
        input_square, error_square: ``Σ x⊙x`` (n) and ``Σ δ⊙δ`` (m).
        input_outer, error_outer, output_outer: ``Σ xxᵀ`` (n x n), ``Σ δδᵀ`` and ``Σ yyᵀ`` (m x m).
        input_total, output_total: ``Σ x`` (n) and ``Σ y`` (m).

    A moment that was not collected is None; the properties then raise ``CalibrationError``.

    >>> x, delta = torch.randn(100, 4), torch.randn(100, 3)  # inputs and output errors of 100 tokens
    >>> moments = LayerMoments(100, cross=delta.mT @ x, input_square=x.square().sum(0))
    >>> moments.G.shape, moments.names()
    (torch.Size([3, 4]), ('cross', 'input_square'))
    """

    num_tokens: int
    cross: Float[torch.Tensor, "m n"] | None = None
    input_square: Float[torch.Tensor, " n"] | None = None
    error_square: Float[torch.Tensor, " m"] | None = None
    input_outer: Float[torch.Tensor, "n n"] | None = None
    error_outer: Float[torch.Tensor, "m m"] | None = None
    input_total: Float[torch.Tensor, " n"] | None = None
    output_outer: Float[torch.Tensor, "m m"] | None = None
    output_total: Float[torch.Tensor, " m"] | None = None

    @property
    def G(self) -> Float[torch.Tensor, "m n"]:
        """Cross moment ``E[δxᵀ]``: the loss gradient of the weight per counted token."""
        return self.mean("cross")

    @property
    def a(self) -> Float[torch.Tensor, " n"]:
        """Input second moment ``E[x⊙x]``."""
        return self.mean("input_square")

    @property
    def d(self) -> Float[torch.Tensor, " m"]:
        """Output-error second moment ``E[δ⊙δ]``."""
        return self.mean("error_square")

    @property
    def A(self) -> Float[torch.Tensor, "n n"]:
        """Dense input second moment ``E[xxᵀ]``."""
        return self.mean("input_outer")

    @property
    def D(self) -> Float[torch.Tensor, "m m"]:
        """Dense output-error second moment ``E[δδᵀ]``."""
        return self.mean("error_outer")

    def mean(self, name: MomentName) -> torch.Tensor:
        """The named sum divided by the token count.

        Raises:
            CalibrationError: The moment was not collected or is not finite.
        """
        return self.total(name) / self.num_tokens

    def total(self, name: MomentName) -> torch.Tensor:
        """The named sum itself, not copied; raises the errors of :meth:`mean`."""
        total: torch.Tensor | None = getattr(self, name)
        if total is None:
            raise CalibrationError(
                f"The moment {name!r} is needed here but was not collected. "
                f"Name it in collect_moments(..., needs=...); collected were: {', '.join(self.names()) or 'none'}."
            )
        require_finite(total, f"The moment {name!r}")
        return total

    def diagonals(self, read: frozenset[MomentName]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The diagonals d (m) and a (n), taken from ``D`` and ``A`` if these are in ``read``; None without a token.

        Raises:
            CalibrationError: As in :meth:`mean`.
        """
        if not self.num_tokens:
            return None, None
        return (
            self.D.diagonal() if "error_outer" in read else self.d,
            self.A.diagonal() if "input_outer" in read else self.a,
        )

    def names(self) -> tuple[MomentName, ...]:
        """The moments that were collected."""
        return tuple(name for name in MOMENT_NAMES if getattr(self, name) is not None)

    def __add__(self, other: LayerMoments) -> LayerMoments:
        """Add the moments of two sets of tokens, for calibration that ran in parts."""
        if self.names() != other.names():
            raise CalibrationError(f"Only moments of the same kind add up, but {self.names()} met {other.names()}.")
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.names()}
        return LayerMoments(num_tokens=self.num_tokens + other.num_tokens, **sums)

    def max_over_median(self, name: MomentName) -> float | None:
        """:func:`max_over_median` of a vector of second moments; None if it was not collected."""
        return None if getattr(self, name) is None else max_over_median(self.mean(name))

    def without_matrices(self) -> LayerMoments:
        """The count and the vectors alone."""
        return replace(self, cross=None, input_outer=None, error_outer=None, output_outer=None)


assert {field.name for field in fields(LayerMoments)} == {"num_tokens", *MOMENT_NAMES}


def max_over_median(diagonal: Float[torch.Tensor, " k"]) -> float:
    """Maximum over median of a diagonal moment; large if there are outlier channels, which whitening corrects.

    >>> max_over_median(torch.tensor([1.0, 2.0, 60.0]))
    30.0
    """
    median = float(diagonal.median())
    return float(diagonal.max()) / median if median > 0 else float("inf")


BLOCKS = 4  # of rows of a product on the CPU, one at a time
MANY = 512  # tokens; the product of fewer takes less time in float32, on a CPU with AMX half at 128


def accumulation_dtype(values: torch.Tensor) -> torch.dtype:
    """The dtype in which values are summed: a bfloat16 sum of 1000 ones is 256."""
    return torch.promote_types(values.dtype, torch.float32)


def square_sum(values: Float[torch.Tensor, "N p"]) -> Float[torch.Tensor, " p"]:
    """``Σ v⊙v`` over rows; values become float32 first, because a product in half precision would be rounded."""
    wide = values.to(accumulation_dtype(values))
    return torch.linalg.vecdot(wide, wide, dim=0)


def outer(left: Float[torch.Tensor, "N p"], right: Float[torch.Tensor, "N q"]) -> Float[torch.Tensor, "p q"]:
    """``leftᵀ right`` with float32 accumulation."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left.mT, right, out_dtype=torch.float32)
    total = torch.zeros(left.shape[1], right.shape[1], dtype=accumulation_dtype(left), device=left.device)
    add_outer(total, left, right)
    return total


def add_outer(
    total: Float[torch.Tensor, "p q"], left: Float[torch.Tensor, "N p"], right: Float[torch.Tensor, "N q"]
) -> None:
    """``total += leftᵀ right`` in place.

    >>> total = torch.ones(1, 2)
    >>> add_outer(total, torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> total.tolist()
    [[2.0, 3.0]]
    """
    if left.is_cuda and left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left.mT, right, out_dtype=torch.float32, out=total)
        return
    of_bfloat16 = left.dtype == right.dtype == torch.bfloat16 and left.device.type == "cpu"
    splits = of_bfloat16 and len(left) >= MANY and _splits()
    if left is right or splits:
        _add_blocks(total, left, right, splits=splits)
    else:
        total.addmm_(left.mT.to(total.dtype), right.to(total.dtype))


def _add_blocks(
    total: Float[torch.Tensor, "p q"],
    left: Float[torch.Tensor, "N p"],
    right: Float[torch.Tensor, "N q"],
    *,
    splits: bool,
) -> None:
    """``total += leftᵀ right``, of a matrix with itself in five eighths of the products: the rest is a copy.

    Args:
        splits: Multiply bfloat16 values twice: once for the rounded product, once for its rounding error.
    """
    is_gram, width = left is right, -(-len(total) // BLOCKS)
    if not splits:
        left, right = left.to(total.dtype), right.to(total.dtype)
    for first in range(0, len(total), width):
        end, start = first + width, first if is_gram else 0
        rows, columns = left[:, first:end].mT, right[:, start:]
        product = rows @ columns
        for part in (product, torch.addmm(product, rows, columns, beta=-1)) if splits else (product,):
            total[first:end, start:] += part
            if is_gram:
                total[end:, first:end] += part[:, width:].mT


@cache
def _splits() -> bool:
    """Whether this CPU multiplies bfloat16 fast, and sums in float32."""
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return False
    values = torch.randn(512, 64, generator=torch.Generator().manual_seed(0), device="cpu").bfloat16()
    summed, exact = torch.zeros(64, 64, device="cpu"), values.double().mT @ values.double()
    _add_blocks(summed, values, values.clone(), splits=True)
    return float((summed - exact).abs().max()) < 1e-4 * float(exact.abs().max())
