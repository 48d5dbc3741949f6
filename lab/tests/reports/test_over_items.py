"""Resampled items, seeds and tasks against every resample counted out, a slow loop, and what theory says."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from statistics import NormalDist, mean

import numpy as np
import pytest
from scipy import stats

from frozencore_lab.reports.statistics import bootstrap_interval, hierarchical_means, item_means, percentiles

TINY = [
    np.array([[[1.0], [0.0]], [[-1.0], [1.0]]]),  # two seeds, two items, one other
    np.array([[[0.0], [0.0]], [[1.0], [0.0]]]),
]


def frequencies(means):
    values, counts = np.unique(np.round(means[:, 0], 9), return_counts=True)
    return dict(zip(values.tolist(), (counts / len(means)).tolist(), strict=True))


def exact(outcomes):
    """The probability of each value, of equally likely outcomes."""
    outcomes = [round(float(value), 9) for value in outcomes]
    return {value: outcomes.count(value) / len(outcomes) for value in outcomes}


def assert_near(found, expected, num_resamples):
    assert found.keys() == expected.keys()
    for value, share in expected.items():
        error = math.sqrt(share * (1 - share) / num_resamples)
        assert found[value] == pytest.approx(share, abs=5 * error)


def test_resampled_items_are_as_likely_as_counting_every_draw_says():
    by_item = [[mean(gain[:, i, 0]) for i in range(2)] for gain in TINY]
    per_task = [[mean(pair) for pair in itertools.product(items, repeat=2)] for items in by_item]
    assert_near(
        frequencies(item_means(TINY, num_resamples=10_000)),
        exact(mean(pair) for pair in itertools.product(*per_task)),
        10_000,
    )


def test_resampled_tasks_seeds_and_items_are_as_likely_as_counting_every_draw_says():
    def draws(gain):  # of one task: its seeds and its items, apart from one another
        for seeds in itertools.product(range(2), repeat=2):
            for items in itertools.product(range(2), repeat=2):
                yield Fraction(sum(int(gain[s, i, 0]) for s in seeds for i in items), 4)

    outcomes = [
        Fraction(first + second, 2)
        for tasks in itertools.product(TINY, repeat=2)
        for first in draws(tasks[0])
        for second in draws(tasks[1])
    ]
    assert_near(frequencies(hierarchical_means(TINY, num_resamples=40_000)), exact(outcomes), 40_000)


def slow_hierarchical(gains, other, draw, num_resamples):
    found = []
    for _ in range(num_resamples):
        means = []
        for gain in draw.choices(gains, k=len(gains)):
            seeds = draw.choices(range(gain.shape[0]), k=gain.shape[0])
            items = draw.choices(range(gain.shape[1]), k=gain.shape[1])
            means.append(mean(gain[s, i, other] for s in seeds for i in items))
        found.append(mean(means))
    return found


@pytest.fixture(scope="module")
def measured():
    """Four tasks of unequal size, three seeds, two other methods."""
    generator = np.random.default_rng(3)
    return [generator.integers(-1, 2, size=(3, size, 2)).astype(float) for size in (12, 20, 9, 15)]


@pytest.mark.parametrize("other", [0, 1])
def test_the_spread_and_the_middle_are_those_of_a_slow_loop(measured, other):
    found = hierarchical_means(measured)[:, other]
    slow = slow_hierarchical(measured, other, random.Random(0), 1500)
    assert found.mean() == pytest.approx(mean(slow), abs=5 * np.std(slow) / math.sqrt(1500))
    assert found.std() == pytest.approx(np.std(slow), rel=0.1)
    for found_end, slow_end in zip(np.quantile(found, [0.025, 0.975]), np.quantile(slow, [0.025, 0.975]), strict=True):
        assert found_end == pytest.approx(slow_end, abs=0.25 * np.std(slow))


def test_the_variance_over_items_is_the_formula(measured):
    found = item_means(measured)
    for other in range(2):
        by_item = [gain[:, :, other].mean(axis=0) for gain in measured]
        variance = sum(np.var(items) / len(items) for items in by_item) / len(measured) ** 2
        assert found[:, other].var() == pytest.approx(variance, rel=0.06)
        assert found[:, other].mean() == pytest.approx(np.mean([items.mean() for items in by_item]), abs=0.005)


def test_one_large_task_has_the_interval_of_the_normal_approximation():
    gains = np.random.default_rng(0).integers(-1, 2, size=(1, 800, 1)).astype(float)
    half = NormalDist().inv_cdf(0.975) * gains.std() / math.sqrt(800)
    ((low, high),) = percentiles(item_means([gains]))
    assert (low, high) == pytest.approx((gains.mean() - half, gains.mean() + half), abs=0.1 * half)


def test_tasks_whose_gains_never_vary_have_the_interval_over_tasks_alone():
    gains = [4.8, 1.4, 1.5, 2.0, 1.2, 1.8, 1.7, 1.8, 10.0, 7.4, 18.8]
    constant = [np.full((3, 5, 1), gain) for gain in gains]
    ((low, high),) = percentiles(hierarchical_means(constant))
    assert (low, high) == pytest.approx(bootstrap_interval(gains), abs=0.15)
    theirs = stats.bootstrap((gains,), np.mean, method="percentile", random_state=1).confidence_interval
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.15)
    ((low, high),) = percentiles(item_means(constant))
    assert low == pytest.approx(high)  # of the same items of the same tasks nothing is uncertain


def test_one_task_and_one_seed_leave_the_items_alone(measured):
    alone = [measured[1][:1]]
    ours, theirs = hierarchical_means(alone, seed=1)[:, 0], item_means(alone, seed=2)[:, 0]
    assert stats.ks_2samp(ours, theirs).pvalue > 0.001


@pytest.mark.parametrize("resample", [item_means, hierarchical_means])
def test_the_same_seed_draws_the_same_and_others_share_the_draws(measured, resample):
    assert np.array_equal(resample(measured), resample(measured))
    assert not np.array_equal(resample(measured), resample(measured, seed=1))
    twice = [np.concatenate([gain[:, :, :1], gain[:, :, :1]], axis=2) for gain in measured]
    found = resample(twice)
    assert np.array_equal(found[:, 0], found[:, 1])
