"""Spearman's rank correlation with a bootstrap interval, within groups of points or over all of them.

Groups, such as the tasks of a campaign, may have different scales. Within groups it is the mean of the groups' ρ, each
weighted by its number of points minus one, which is the inverse of its variance for independent values. A group in
which a value does not vary has no ρ and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from frozencore_lab.reports.statistics import COVERAGE

NUM_RANK_RESAMPLES = 2_000
FEWEST_POINTS = 6
"""The fewest points for a correlation: few points in perfect order would have an interval of zero width."""
Array = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True)
class Correlation:
    """ρ, its 95 % percentile interval over resampled groups and points, and how many points there are."""

    rho: float
    low: float
    high: float
    num_points: int


def rank_correlation(
    x: Sequence[float], y: Sequence[float], groups: Sequence[int], *, within: bool = True, seed: int = 0
) -> Correlation | None:
    """Correlate two values of each point.

    Groups are resampled with replacement, and points within each group. The result is None if the groups with a ρ have
    fewer than six points together, or if ρ is undefined in more than 5 % of the resamples.

    Args:
        groups: The group of each point.
        within: Take ranks in each group; otherwise over all points.
    """
    members = [np.flatnonzero(np.asarray(groups) == group) for group in dict.fromkeys(groups)]
    u, v = (np.asarray(values, dtype=float) for values in (x, y))
    if within:
        members = [own for own in members if len(set(u[own])) > 1 and len(set(v[own])) > 1]
    num_points = sum(map(len, members))
    if num_points < FEWEST_POINTS:
        return None
    found = correlations(u, v, members, members if within else [np.arange(len(u))], seed=seed)
    if np.isnan(found).mean() > 1 - COVERAGE:
        return None
    low, high = np.nanquantile(found[1:], [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Correlation(float(found[0]), float(low), float(high), num_points)


def correlations(x: Array, y: Array, groups: Sequence[Places], parts: Sequence[Places], *, seed: int) -> Array:
    """(1 + resamples): the measured ρ, then that of each resample; NaN if no part has one.

    Args:
        groups: Indices of the points of each group, for resampling.
        parts: Indices of the points that are ranked together.
    """
    counts = np.empty((NUM_RANK_RESAMPLES + 1, len(x)))
    for group, own in zip(groups, _draws(tuple(map(len, groups)), seed), strict=True):
        counts[:, group] = own
    rho = np.stack([_spearman(x[part], y[part], counts[:, part]) for part in parts])
    freedom = np.stack([counts[:, part].sum(axis=1) * (1 - 1 / len(part)) for part in parts]) * ~np.isnan(rho)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(freedom * rho, axis=0) / freedom.sum(axis=0))


@lru_cache(maxsize=16)  # shared by the statistics of the same points
def _draws(sizes: tuple[int, ...], seed: int) -> list[Array]:
    """(1 + resamples, size) of each group: how often each of its points is drawn; the first row is all ones."""
    generator = np.random.default_rng(seed)
    times = generator.multinomial(len(sizes), _even(len(sizes)), size=NUM_RANK_RESAMPLES)
    drawn = [generator.multinomial(times[:, i] * size, _even(size)) for i, size in enumerate(sizes)]
    return [np.concatenate([np.ones((1, own.shape[1])), own]) for own in drawn]


def _even(size: int) -> Array:
    return np.full(size, 1 / size)


def _spearman(x: Array, y: Array, counts: Array) -> Array:
    """(resamples,): ρ of points repeated ``counts`` times; NaN if a value does not vary."""
    middle = counts.sum(axis=1, keepdims=True) / 2
    u, v = (_mid_ranks(values, counts) - middle for values in (x, y))
    cross, square_x, square_y = ((counts * one * other).sum(axis=1) for one, other in ((u, v), (u, u), (v, v)))
    with np.errstate(invalid="ignore"):
        return np.asarray(cross / np.sqrt(square_x * square_y))  # the sums are multiples of 1/4, so they are exact


def _mid_ranks(values: Array, counts: Array) -> Array:
    """(resamples, points): the rank of each point repeated ``counts`` times; ties share their mean rank.

    Ranks start at one half instead of one, so that their mean is half the number of points.
    """
    order = np.argsort(values, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))  # the last point of each group of ties
    below_or_at = np.cumsum(counts[:, order], axis=1)[:, ends]
    below = np.concatenate([np.zeros((len(counts), 1)), below_or_at[:, :-1]], axis=1)
    tie = np.searchsorted(values[order][ends], values)
    return ((below + below_or_at) / 2)[:, tie]
