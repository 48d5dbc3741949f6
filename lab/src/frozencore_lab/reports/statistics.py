"""Statistics over seeds and over tasks (paper, "Statistical reporting"): the task is the unit of replication.

Differences over tasks are ``reference - other``, rounded to the 12th digit of the larger value. So differences that are
equal in print (95.1 - 94.8 and 85.9 - 85.6) are ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from frozencore.errors import DataError

DIGITS = 12
MOST_EXACT = 100
"""The most nonzero differences for the exact signed-rank distribution; above, the normal approximation is used."""
NUM_RESAMPLES = 10_000
COVERAGE = 0.95
REAL_COVERAGE = {2: 0.50, 3: 0.74, 4: 0.79, 5: 0.83, 6: 0.86, 7: 0.87, 8: 0.89, 9: 0.90, 10: 0.90, 11: 0.90}
"""The coverage of the bootstrap interval for few normal differences, by simulation."""


@dataclass(frozen=True)
class SignedRank:
    """Wilcoxon's signed-rank test.

    Attributes:
        statistic: The smaller of the rank sums of either sign; ties share their mean rank.
        p: Two-sided.
        exact: Whether p is exact over all assignments of signs; otherwise it is the normal approximation.
    """

    statistic: float
    p: float
    exact: bool


def mean(values: Mapping[str, float | None]) -> float:
    """The mean of named values.

    Raises:
        DataError: There are no values, or one is missing or not finite; the message names it.
    """
    return math.fsum(whole(values)) / len(values)


def whole(values: Mapping[str, float | None]) -> list[float]:
    """Return the values if all exist and are finite.

    Raises:
        DataError: There are no values, or one is missing or not finite; the message names it.
    """
    if not values:
        raise DataError("A mean needs at least one value, but none came.")
    found = []
    for name, value in values.items():
        if value is None or not math.isfinite(value):
            came = "is missing" if value is None else f"is {value}"
            raise DataError(f"Only whole sets of values are averaged, but {name} {came}. Run it, or leave its row out.")
        found.append(value)
    return found


def sample_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (divisor n - 1); None for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def differences(reference: Sequence[float], other: Sequence[float]) -> list[float]:
    """``reference - other`` by task."""
    return [_difference(x, y) for x, y in zip(reference, other, strict=True)]


def _difference(x: float, y: float) -> float:
    larger = max(abs(x), abs(y))
    return round(x - y, DIGITS - 1 - math.floor(math.log10(larger))) if larger > 0 else 0.0


def wins_ties_losses(differences: Sequence[float]) -> tuple[int, int, int]:
    """The numbers of differences above, at and below 0."""
    return sum(d > 0 for d in differences), sum(d == 0 for d in differences), sum(d < 0 for d in differences)


def signed_rank(differences: Sequence[float]) -> SignedRank:
    """Two-sided Wilcoxon signed-rank test of differences whose median is 0 under the hypothesis.

    Zeros are dropped and ties share their mean rank, as in Wilcoxon's test. The distribution of the rank sum, given
    these ranks, is over all ``2^n`` assignments of signs, so p is exact with ties too.
    """
    nonzero = [d for d in differences if d != 0]
    if not nonzero:
        return SignedRank(0.0, 1.0, exact=True)
    doubled = [round(2 * rank) for rank in stats.rankdata(np.abs(nonzero))]  # mean ranks are multiples of one half
    positive = sum(rank for rank, d in zip(doubled, nonzero, strict=True) if d > 0)
    smaller = min(positive, sum(doubled) - positive)
    exact = len(nonzero) <= MOST_EXACT
    p = _exact_p(doubled, smaller) if exact else float(stats.wilcoxon(nonzero, method="asymptotic").pvalue)
    return SignedRank(smaller / 2, p, exact)


def _exact_p(doubled: Sequence[int], smaller: int) -> float:
    counts = {0: 1}
    for rank in doubled:
        after = dict(counts)
        for total, count in counts.items():
            after[total + rank] = after.get(total + rank, 0) + count
        counts = after
    tail = sum(count for total, count in counts.items() if total <= smaller)
    return min(1.0, 2 * tail / 2 ** len(doubled))


def paired_t(differences: Sequence[float]) -> float | None:
    """Two-sided p of the paired t-test; None if all differences are equal."""
    if len(differences) < 2 or np.ptp(differences) == 0:
        return None
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def bootstrap_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Percentile interval (95 %) of the mean difference, over 10,000 draws of tasks with replacement."""
    drawn = np.random.default_rng(0).choice(np.asarray(differences), size=(NUM_RESAMPLES, len(differences)))
    low, high = np.quantile(drawn.mean(axis=1), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment over the tests with a p, in the given order."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for place, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - place) * p))
        adjusted[i] = largest
    return adjusted


def mean_ranks(columns: Mapping[str, Sequence[float]], *, lower_is_better: bool = False) -> dict[str, float]:
    """Mean over tasks of each column's rank, 1 the best; ties share their mean rank."""
    sign = 1 if lower_is_better else -1
    ranks = stats.rankdata(sign * np.array(list(columns.values())), axis=0)
    return {name: float(row.mean()) for name, row in zip(columns, ranks, strict=True)}
