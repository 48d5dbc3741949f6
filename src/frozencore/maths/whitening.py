"""The local Fisher metric of a layer: ``A^-1/2`` and ``D^-1/2`` (paper, section 3.1 and appendix A.4).

``A = diag(a) + ε_A I`` with ``ε_A = c·mean(a)``; D is made of d in the same way. Damping is relative to the mean, so
whitening is the same for sums and means and at any scale of the loss (docs/method.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxtyping import Float

from frozencore.device import torch
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.linalg import inverse_root
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.options import Bounds, check_options

Sides = Literal["both", "input", "output", "none"]
Fisher = Literal["diagonal", "dense"]
Fraction = Annotated[float, Bounds(ge=0, le=1)]
Positive = Annotated[float, Bounds(gt=0)]
Damping = Positive | tuple[Positive, Positive]

InverseRoot = Callable[["torch.Tensor"], "torch.Tensor"]
"""A function that multiplies a matrix from the left by an inverse square root: ``X -> A^-1/2 X``."""


@dataclass
class WhiteningOptions:
    """The options of the metric.

    Attributes:
        whiten: Whiten both sides (FCCA), one, or none (RawGrad).
        fisher: ``diagonal`` moments, or ``dense`` K-FAC factors.
        shrinkage: With dense factors, the share λ of the diagonal: ``(1 - λ)·A + λ·diag(A)``.
        damping: c of ``ε = c·mean(diagonal)``; one number, or one for the input and one for the output side.
    """

    whiten: Annotated[Sides, "Sides that are whitened."] = "both"
    fisher: Annotated[Fisher, "Diagonal moments, or dense factors (K-FAC)."] = "diagonal"
    shrinkage: Annotated[Fraction, "Share of the diagonal in dense factors."] = 0.0
    damping: Annotated[Damping, "Damping relative to the mean second moment; two values: input side, output side."] = (
        1e-3
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.shrinkage and self.fisher != "dense":
            raise ConfigError("shrinkage mixes dense factors with their diagonal: it needs fisher='dense'.")


@dataclass
class Whitening(WhiteningOptions):
    """The metric in which the rank constraint is imposed.

    >>> sorted(Whitening(whiten="input").needs())
    ['input_square']
    """

    @property
    def damping_by_side(self) -> tuple[float, float]:
        """c of the input side and of the output side."""
        return self.damping if isinstance(self.damping, tuple) else (self.damping, self.damping)

    @property
    def moments_by_side(self) -> tuple[MomentName | None, MomentName | None]:
        """The second moment of the input side and of the output side; None for a side that is not whitened."""
        A: MomentName = "input_square" if self.fisher == "diagonal" else "input_outer"
        D: MomentName = "error_square" if self.fisher == "diagonal" else "error_outer"
        return A if self.whiten in ("both", "input") else None, D if self.whiten in ("both", "output") else None

    def needs(self) -> frozenset[MomentName]:
        """The moments that this metric needs."""
        return frozenset(name for name in self.moments_by_side if name is not None)

    def inverse_roots(self, moments: LayerMoments) -> tuple[InverseRoot, InverseRoot]:
        """``A^-1/2`` and ``D^-1/2``; the identity for a side that is not whitened."""
        A_root, D_root = (
            identity if name is None else damped_inverse_root(moments.mean(name), damping, self.shrinkage)
            for name, damping in zip(self.moments_by_side, self.damping_by_side, strict=True)
        )
        return A_root, D_root


def damped(
    second_moment: Float[torch.Tensor, " n"] | Float[torch.Tensor, "n n"], damping: float, shrinkage: float = 0.0
) -> torch.Tensor:
    """The metric in float64: ``A + ε I`` as a vector (diagonal) or a matrix (dense, shrunk to its diagonal).

    Raises:
        CalibrationError: The diagonal is all zero, so relative damping is zero too.
    """
    moment, epsilon = second_moment.double(), _epsilon(second_moment, damping)
    if moment.ndim == 1:
        return moment + epsilon
    return (1 - shrinkage) * moment + torch.diag(shrinkage * moment.diagonal() + epsilon)


def damped_inverse_root(
    second_moment: Float[torch.Tensor, " n"] | Float[torch.Tensor, "n n"], damping: float, shrinkage: float = 0.0
) -> InverseRoot:
    """The inverse square root of a damped diagonal (vector) or dense (matrix) second moment.

    >>> root = damped_inverse_root(torch.tensor([3.0, 15.0]), damping=1 / 9)  # epsilon = 1
    >>> root(torch.ones(2, 1)).squeeze().tolist()
    [0.5, 0.25]
    """
    metric = damped(second_moment, damping, shrinkage)
    if metric.ndim == 1:
        root = metric.rsqrt()
        return lambda X: (root[:, None] * X.double()).to(X.dtype)
    dense_root = inverse_root(metric, _epsilon(second_moment, damping))
    return lambda X: (dense_root @ X.double()).to(X.dtype)


def _epsilon(second_moment: torch.Tensor, damping: float) -> float:
    diagonal = second_moment.double() if second_moment.ndim == 1 else second_moment.double().diagonal()
    epsilon = damping * float(diagonal.mean())
    if epsilon <= 0:
        raise CalibrationError(
            "Whitening divides by a second moment, but it is zero in every coordinate. "
            "Check that the calibration data reaches this layer and carries labels."
        )
    return epsilon


def identity(X: torch.Tensor) -> torch.Tensor:
    """Return X: the root of a side that is not whitened."""
    return X
