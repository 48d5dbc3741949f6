"""The ranks of layers, when a number of trained values is given instead of a rank.

A core of rank r holds r² values. With ``g_k`` the gain of the k-th direction of a layer, rank r gains
``C(r) = Σ_{k≤r} g_k``: for the singular values σ of a whitened cross moment, ``g_k = σ_k²`` (J of docs/maths.md). Ranks
maximise ``Σ_l C_l(r_l)`` under ``Σ_l r_l² ≤ budget``: steps along the upper concave envelope of each layer's ``C(r)``
over ``r²``, the best per value first, over all layers together; what is left goes to the best steps that still fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import isqrt

from frozencore.errors import ConfigError
from frozencore.maths.linalg import Shape

MOST_OF_UNIFORM = 4  # times the rank that all layers could have: the number of directions that are looked at


def allocate_ranks(gains: Mapping[str, Sequence[float]], budget: int) -> dict[str, int]:
    """Ranks by layer, in the layers' order; 0 for one that is worth nothing, or less than what others offer.

    The sum of the gains is at most one step of one layer below the best possible one, and equal to it wherever the
    steps along the envelopes spend the budget.

    Args:
        gains: The gain of each direction of a layer, in the order in which a rank takes them; none is negative.
        budget: Values of all cores together, at most.
    """
    return allocations(gains, [budget])[0]


def allocations(gains: Mapping[str, Sequence[float]], budgets: Sequence[int]) -> list[dict[str, int]]:
    """The ranks of :func:`allocate_ranks` for each of several budgets."""
    worth = {name: [0.0, *accumulate(own)] for name, own in gains.items()}
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
    """The largest rank that all layers can have within a budget; a layer with fewer inputs or outputs gets what fits.

    Raises:
        ConfigError: Not even rank one fits; the smallest budget is named.
    """
    widths = {name: min(shape) for name, shape in shapes.items()}
    if budget < len(widths):
        raise ConfigError(
            f"Ranks that no spectrum tells apart are equal, and rank 1 in {len(widths)} layers takes {len(widths)} "
            f"values, but the rank budget is {budget}. Give that much, or fewer target modules."
        )
    rank = max(r for r in range(1, isqrt(budget) + 1) if sum(min(r, w) ** 2 for w in widths.values()) <= budget)
    return {name: min(rank, width) for name, width in widths.items()}


def num_candidates(shape: Shape, num_layers: int, budget: int) -> int:
    """The number of directions of a layer that are looked at.

    At most as many as it has, as the budget allows it alone, and four times the rank that all layers could have, which
    takes sixteen times a layer's share.
    """
    return min(*shape, isqrt(budget), MOST_OF_UNIFORM * max(1, isqrt(budget // num_layers)))


def num_values(ranks: Mapping[str, int]) -> int:
    """Σr², what the cores of those ranks train."""
    return sum(rank * rank for rank in ranks.values())


def _envelope(worth: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Steps from rank to rank along the upper concave envelope of the worth over r², as far as it rises."""
    rank = 0
    while rank + 1 < len(worth):
        following = max(range(rank + 1, len(worth)), key=lambda r: (_rate(worth, rank, r), -r))
        if worth[following] <= worth[rank]:
            return
        yield rank, following
        rank = following


def _best_step(name: str, worth: Sequence[float], rank: int, left: int) -> tuple[float, str, int] | None:
    """The step from a rank that is worth most per value among those that fit; None if none is worth anything."""
    fitting = [r for r in range(rank + 1, len(worth)) if r * r - rank * rank <= left and worth[r] > worth[rank]]
    if not fitting:
        return None
    best = max(fitting, key=lambda r: (_rate(worth, rank, r), -r))
    return _rate(worth, rank, best), name, best


def _rate(worth: Sequence[float], a: int, b: int) -> float:
    return (worth[b] - worth[a]) / (b * b - a * a)
