"""Statistics over tasks (paper, "Statistical reporting"), and over seeds and evaluation rows of one task.

Over tasks, the task is the unit of replication. Differences over tasks are ``reference - other``, rounded to the 12th
digit of the larger value. So differences that are equal in print (95.1 - 94.8 and 85.9 - 85.6) are ties.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import stats

from frozencore.errors import DataError
from frozencore.tune.record import RunRecord, TunedRecord

DIGITS = 12
NUM_RESAMPLES = 10_000
ROW_DRAWS = 2_000
Over = Literal["seeds and rows", "seeds", "rows"]
COVERAGE = 0.95
REAL_COVERAGE = {2: 0.50, 3: 0.74, 4: 0.79, 5: 0.83, 6: 0.86, 7: 0.87, 8: 0.89, 9: 0.90, 10: 0.90, 11: 0.90}
"""The coverage of the bootstrap interval for few normal differences, by simulation."""


def mean(values: Mapping[str, float | None]) -> float:
    """The mean of named values, which must be :func:`whole`."""
    return math.fsum(whole(values)) / len(values)


def whole(values: Mapping[str, float | None]) -> list[float]:
    """Return the values if all exist and are finite.

    Raises:
        DataError: There are no values, or one is missing or not finite; the message names it.
    """
    if not values:
        raise DataError("A mean needs at least one value, but none was given.")
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


def _rounded(x: float) -> float:
    return _difference(x, 0.0)


def wins_ties_losses(differences: Sequence[float]) -> tuple[int, int, int]:
    """The numbers of differences above, at and below 0."""
    return sum(d > 0 for d in differences), sum(d == 0 for d in differences), sum(d < 0 for d in differences)


def signed_rank(differences: Sequence[float]) -> float:
    """Two-sided p of the Wilcoxon signed-rank test of differences whose median is 0 under the hypothesis.

    Zeros are dropped and ties share their mean rank, as in Wilcoxon's test. The distribution of the rank sum, given
    these ranks, is over all ``2^n`` assignments of signs, so p is exact with ties too.
    """
    nonzero = [d for d in differences if d != 0]
    doubled = [round(2 * rank) for rank in stats.rankdata(np.abs(nonzero))]  # mean ranks are multiples of one half
    positive = sum(rank for rank, d in zip(doubled, nonzero, strict=True) if d > 0)
    chances = np.zeros(sum(doubled) + 1)  # of each rank sum
    chances[0] = 1.0
    for rank in doubled:
        chances = (chances + np.concatenate([np.zeros(rank), chances[:-rank]])) / 2
    return min(1.0, 2 * float(chances[: min(positive, sum(doubled) - positive) + 1].sum()))


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


@dataclass(frozen=True)
class Scored:
    """One run's score, and its parts by evaluation row: the score is the sum of ``sums`` over the sum of ``counts``.

    For an accuracy a row's sum is 0 or 1 and its count 1; for a held-out loss they are nats and tokens.

    Attributes:
        rows: A key for each row, equal for the same row in another run; empty if only the score is known.
    """

    value: float
    rows: Sequence[Hashable] = ()
    sums: Sequence[float] = ()
    counts: Sequence[float] = ()


def scored(record: RunRecord, key: str, *, scale: float = 1.0) -> Scored | None:
    """A record's score by its key, and its rows if the record has them; None without a finite score."""
    value = getattr(record, key, None)
    if value is None:
        return None
    if isinstance(record, TunedRecord):
        losses, answers = record.row_losses, record.score.correct if record.score else None
        numbers = losses.numbers if losses else [(record.hashes.evaluation, i) for i in range(len(answers or ""))]
        if key == "held_out_loss" and losses is not None:
            return Scored(value, numbers, losses.nats, losses.tokens)
        if key == "accuracy" and answers is not None and len(answers) == len(numbers):
            return Scored(scale * value, numbers, [scale * int(answer) for answer in answers], [1.0] * len(answers))
    return Scored(scale * value)


@dataclass(frozen=True)
class Difference:
    """A mean difference between two methods: 95 % interval and two-sided p.

    Attributes:
        half: Half the interval's width; None if neither seeds nor rows repeat.
        p: None without an interval, or if all differences are equal.
        over: What the interval counts.
        freedom: Student's degrees of freedom; None without an interval.
        holm: p after Holm's adjustment over all comparisons with the same reference; see :func:`adjusted`.
    """

    mean: float
    half: float | None
    p: float | None
    over: Over
    freedom: float | None = None
    holm: float | None = None


def paired_difference(runs: Sequence[Scored], others: Sequence[Scored], *, draws: int = ROW_DRAWS) -> Difference:
    """The mean over seeds of ``run - other``, by a paired bootstrap over seeds and rows; the runs are paired by seed.

    Rows are drawn with replacement, jointly for both methods and for all seeds that evaluate a row. The difference's
    variance has two parts. The bootstrap over seeds of a mean has the closed form ``s²/n``; it holds the chance of each
    seed's own rows too. Rows that several seeds share move these seeds together: their part is the mean covariance of
    two seeds' differences under the drawn rows. Student's t has Satterthwaite's degrees of freedom of the two parts.
    If a run has no rows, or rows other than its partner's, the interval is over seeds alone.
    """
    apart = np.array(differences([run.value for run in runs], [other.value for other in others]))
    num_seeds, drawn = len(apart), _drawn_differences(runs, others, draws)
    of_seeds = float(apart.var(ddof=1)) / num_seeds if num_seeds > 1 else 0.0
    of_rows, num_rows = 0.0, 2
    if drawn is not None:
        covariance = np.cov(drawn[0], rowvar=False).reshape(num_seeds, num_seeds)
        num_rows, total = drawn[1], float(covariance.sum())
        pairs = num_seeds * (num_seeds - 1)
        of_rows = max(0.0, (total - float(covariance.trace())) / pairs) if pairs else total
    over: Over = "seeds" if drawn is None else "seeds and rows" if num_seeds > 1 else "rows"
    mean, variance = float(apart.mean()), of_seeds + of_rows
    if variance == 0:
        return Difference(mean, 0.0 if num_seeds > 1 or drawn else None, None, over)
    freedom = variance**2 / (of_seeds**2 / max(1, num_seeds - 1) + of_rows**2 / max(1, num_rows - 1))
    error = math.sqrt(variance)
    half = float(stats.t.ppf((1 + COVERAGE) / 2, freedom)) * error
    return Difference(mean, half, float(2 * stats.t.sf(abs(mean) / error, freedom)), over, freedom)


def adjusted(differences: Sequence[Difference]) -> list[Difference]:
    """The same differences with Holm's adjustment over all of them."""
    return [replace(one, holm=p) for one, p in zip(differences, holm([one.p for one in differences]), strict=True)]


def _drawn_differences(
    runs: Sequence[Scored], others: Sequence[Scored], draws: int
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float64]], int] | None:
    """Each seed's difference under drawn rows, (draws, seeds), and the number of distinct rows; None without rows."""
    pairs = list(zip(runs, others, strict=True))
    if any(not run.rows or list(run.rows) != list(other.rows) for run, other in pairs):
        return None
    places = {row: place for place, row in enumerate(dict.fromkeys(row for run in runs for row in run.rows))}
    parts = np.zeros((4, len(places), len(pairs)))
    for seed, (run, other) in enumerate(pairs):
        rows = [places[row] for row in run.rows]
        parts[:, rows, seed] = run.sums, run.counts, other.sums, other.counts
    weights = _row_weights(draws, len(places))
    own_sums, own_counts, sums, counts = (weights @ part for part in parts)
    whole = (own_counts > 0).all(1)  # a draw may hold no row of a seed with few rows
    if whole.sum() < 2:
        return None
    return own_sums[whole] / own_counts[whole] - sums[whole] / counts[whole], len(places)


@lru_cache(maxsize=1)
def _row_weights(draws: int, num_rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Poisson weights, (draws, rows): each row's number of draws, independent of the other rows'."""
    return np.random.default_rng(0).poisson(1.0, (draws, num_rows)).astype(np.float64)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment over the tests with a p, in the given order; NaN is none."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None and not math.isnan(p))
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for place, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - place) * p))
        adjusted[i] = largest
    return adjusted


def mean_ranks(columns: Mapping[str, Sequence[float]], *, lower_is_better: bool = False) -> dict[str, float]:
    """Mean over tasks of each column's rank, 1 the best; ties share their mean rank."""
    sign = 1 if lower_is_better else -1
    ranks = stats.rankdata([[sign * _rounded(value) for value in own] for own in columns.values()], axis=0)
    return {name: float(row.mean()) for name, row in zip(columns, ranks, strict=True)}
