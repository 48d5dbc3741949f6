"""Choose the ranks of layers for a budget of trained values.

A core of rank r holds r² values. With ``g_k`` the gain of the k-th direction of a layer, rank r gains
``C(r) = Σ_{k≤r} g_k``. For the singular values σ of a whitened cross moment, ``g_k = σ_k²`` (J of docs/maths.md). The
ranks maximise ``Σ_l C_l(r_l)`` under ``Σ_l r_l² ≤ budget``. Each layer takes steps along the upper concave envelope of
its ``C(r)`` over ``r²``; over all layers, the step with the best gain per value comes first. The rest of the budget
goes to the best steps that still fit.

The gain of a direction beyond noise is estimated from two halves of the calibration set (not in the paper).

    T₁, T₂: the matrix whose singular directions a basis takes, computed from each half of the examples
    C₁ = U₁ᵀ T₂ V₁,  C₂ = U₂ᵀ T₁ V₂        with the leading directions of each half:  T₁ ≈ U₁ Σ₁ V₁ᵀ,  T₂ ≈ U₂ Σ₂ V₂ᵀ

The k-th diagonal entry of C₁ measures the k-th direction of one half on the other half, which did not choose it. The
entry is σ_k where the halves agree, and noise around zero where they do not. The other entries of its row and column
show how large this noise is. Singular values alone do not show the noise: pure noise has large ones too.

Shapes: T m x n, K directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import isqrt

from jaxtyping import Float

from frozencore.errors import ConfigError
from frozencore.maths.linalg import (
    Shape,
    SvdMethod,
    truncated_svd,
)
from frozencore.torch_later import torch

NOISE_LEVELS = 2.0  # standard deviations of the noise that a direction must exceed in both halves


def agreed_gains(
    T1: Float[torch.Tensor, "m n"],
    T2: Float[torch.Tensor, "m n"],
    count: int,
    *,
    svd_method: SvdMethod = "auto",
    seed: int = 0,
) -> Float[torch.Tensor, " k"]:
    """Estimate the gains of the ``count`` leading directions: σ_k² if both halves are equal, 0 where they disagree.

    Raises:
        CalibrationError: A matrix is not finite.
    """
    crossed = []
    for own, other in ((T1, T2), (T2, T1)):
        U, _, V = truncated_svd(own, count, method=svd_method, seed=seed)
        crossed.append(U.mT @ other @ V)
    return gains_of(*crossed)


def gains_of(C1: Float[torch.Tensor, "k k"], C2: Float[torch.Tensor, "k k"]) -> Float[torch.Tensor, " k"]:
    """The gains from C₁ and C₂."""
    first, second = C1.double(), C2.double()
    agree = (first.diagonal() > NOISE_LEVELS * _noise(first)) & (second.diagonal() > NOISE_LEVELS * _noise(second))
    return torch.where(agree, first.diagonal() * second.diagonal(), 0.0)


def _noise(C: Float[torch.Tensor, "k k"]) -> Float[torch.Tensor, " k"]:
    """The root mean square of the other entries in each direction's row and column; 0 for a single direction."""
    squares = C.square() - torch.diag(C.diagonal().square())
    return ((squares.sum(0) + squares.sum(1)) / max(1, 2 * (len(C) - 1))).sqrt()


MOST_OF_UNIFORM = 4  # times the uniform rank: the most directions considered in a layer


def allocate_ranks(gains: Mapping[str, Sequence[float]], budget: int) -> dict[str, int]:
    """Choose ranks by layer, in the layers' order; a layer whose directions gain too little gets 0.

    The sum of the gains is at most one step of one layer below the best possible sum. It equals the best sum if the
    steps along the envelopes spend the whole budget.

    Args:
        gains: The nonnegative gains of a layer's directions, in the order in which a rank takes them.
        budget: The most values of all cores together.
    """
    return allocations(gains, [budget])[0]


def allocations(gains: Mapping[str, Sequence[float]], budgets: Sequence[int]) -> list[dict[str, int]]:
    """Compute :func:`allocate_ranks` for several budgets."""
    worth = {name: [0.0, *accumulate(_without_end(own))] for name, own in gains.items()}
    order = {name: number for number, name in enumerate(gains)}
    steps = ((_rate(worth[name], a, b), name, a, b) for name in gains for a, b in _envelope(worth[name]))
    best_first = sorted(steps, key=lambda step: (-step[0], step[3], order[step[1]]))
    return [_spent(worth, best_first, budget) for budget in budgets]


def _spent(
    worth: Mapping[str, Sequence[float]], best_first: Sequence[tuple[float, str, int, int]], budget: int
) -> dict[str, int]:
    ranks, left = dict.fromkeys(worth, 0), budget
    for _, name, a, b in best_first:
        if ranks[name] == a and b * b - a * a <= left:
            ranks[name], left = b, left - (b * b - a * a)
    while fitting := [step for name in worth if (step := _best_step(name, worth[name], ranks[name], left))]:
        _, name, b = max(fitting)
        left -= b * b - ranks[name] ** 2
        ranks[name] = b
    return ranks


def uniform_ranks(shapes: Mapping[str, Shape], budget: int) -> dict[str, int]:
    """Give all layers the largest equal rank within a budget; a layer with fewer inputs or outputs gets a smaller one.

    Raises:
        ConfigError: Not even rank one fits; the message names the smallest budget.
    """
    widths = {name: min(shape) for name, shape in shapes.items()}
    if budget < len(widths):
        raise ConfigError(
            f"Rank 1 in each of the {len(widths)} layers takes {len(widths)} values, but the rank budget is {budget}. "
            "Give that much, or fewer target modules."
        )
    largest = min(isqrt(budget), max(widths.values()))
    rank = max(r for r in range(1, largest + 1) if sum(min(r, w) ** 2 for w in widths.values()) <= budget)
    return {name: min(rank, width) for name, width in widths.items()}


def num_candidates(shape: Shape, num_layers: int, budget: int) -> int:
    """The number of directions to consider in a layer.

    It is limited by the layer's own number of directions, by the budget, and by four times the uniform rank, which
    costs sixteen times a layer's share.
    """
    return min(*shape, isqrt(budget), MOST_OF_UNIFORM * max(1, isqrt(budget // num_layers)))


def num_values(ranks: Mapping[str, int]) -> int:
    """Σr², the number of trained values of cores with these ranks."""
    return sum(rank * rank for rank in ranks.values())


def _envelope(worth: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield the steps from rank to rank along the upper concave envelope of the gain over r², while it rises."""
    rank = 0
    while rank + 1 < len(worth):
        following = max(range(rank + 1, len(worth)), key=lambda r: (_rate(worth, rank, r), -r))
        if worth[following] <= worth[rank]:
            return
        yield rank, following
        rank = following


def _best_step(name: str, worth: Sequence[float], rank: int, left: int) -> tuple[float, str, int] | None:
    """The step from a rank with the best gain per value among those that fit; None if no step gains anything."""
    fitting = [r for r in range(rank + 1, len(worth)) if r * r - rank * rank <= left and worth[r] > worth[rank]]
    if not fitting:
        return None
    best = max(fitting, key=lambda r: (_rate(worth, rank, r), -r))
    return _rate(worth, rank, best), name, best


def _without_end(gains: Sequence[float]) -> Sequence[float]:
    """Without the directions at the end that gain nothing, which no rank takes: noise has many."""
    return gains[: max((rank for rank, gain in enumerate(gains, start=1) if gain), default=0)]


def _rate(worth: Sequence[float], a: int, b: int) -> float:
    return (worth[b] - worth[a]) / (b * b - a * a)
