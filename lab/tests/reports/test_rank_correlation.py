"""Rank correlations against SciPy, on what was measured and on every kind of resample."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from frozencore_lab.reports.rank_correlation import NUM_RANK_RESAMPLES, correlations, rank_correlation

POINTS = st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=6, max_size=15)
NUM_SLOW = 100


@given(POINTS)
@settings(max_examples=60, deadline=None)
def test_one_group_is_spearmans_rho_ties_and_all(points):
    x, y = np.array(points, dtype=float).T
    alone = [np.arange(len(x))]
    measured = correlations(x, y, alone, alone, seed=0)[0]
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(measured)
    else:
        assert measured == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)


def spearman(x, y, parts, sizes):
    """The mean of SciPy's ρ, weighted by degrees of freedom as often as a part is drawn; those without a ρ left out."""
    total = weight = 0
    for part, size in zip(parts, sizes, strict=True):
        u, v = [x[i] for i in part], [y[i] for i in part]
        if len(set(u)) > 1 and len(set(v)) > 1:
            times = len(part) / size
            total += times * (size - 1) * stats.spearmanr(u, v).statistic
            weight += times * (size - 1)
    return total / weight if weight else float("nan")


@pytest.mark.parametrize("within", [True, False])
def test_each_resample_is_that_which_is_written_out(within):
    draw = np.random.default_rng(5)
    groups = [0] * 7 + [1] * 12 + [2] * 5 + [3] * 2
    x = (draw.integers(0, 6, size=26) + 10 * np.array(groups)).astype(float)
    y = -x + draw.integers(0, 7, size=26)
    members = [np.flatnonzero(np.array(groups) == group) for group in range(4)]
    parts = members if within else [np.arange(26)]
    found = correlations(x, y, members, parts, seed=4)
    generator = np.random.default_rng(4)
    times = generator.multinomial(4, [1 / 4] * 4, size=NUM_RANK_RESAMPLES)
    shares = [generator.multinomial(times[:, i] * len(own), [1 / len(own)] * len(own)) for i, own in enumerate(members)]
    counts = np.concatenate(shares, axis=1)
    drawn = [[np.repeat(part, count[part]) for part in parts] for count in counts[:NUM_SLOW]]
    sizes = [len(part) for part in parts]
    expected = [spearman(x, y, one, sizes) for one in drawn]
    np.testing.assert_allclose(found[1 : NUM_SLOW + 1], expected, atol=1e-12)
    told = rank_correlation(x, y, groups, within=within, seed=4)
    assert told.rho == pytest.approx(spearman(x, y, parts, sizes))
    assert [told.low, told.high] == pytest.approx(np.nanquantile(found[1:], [0.025, 0.975]).tolist())
    assert told.low < told.rho < told.high


def test_groups_on_other_scales_pool_to_what_holds_in_each_of_them():
    x = [1, 2, 3, 4, 101, 102, 103, 104]
    y = [4, 3, 2, 1, 904, 903, 902, 901]  # falls in each group, rises over both
    groups = [0] * 4 + [1] * 4
    assert rank_correlation(x, y, groups).rho == pytest.approx(-1)
    assert rank_correlation(x, y, groups, within=False).rho == pytest.approx(stats.spearmanr(x, y).statistic)
    assert rank_correlation(x, y, groups, within=False).rho > 0.5


def test_the_interval_of_a_correlation_that_is_there_leaves_out_nought_and_covers_the_truth():
    """Fisher's interval of normal points, turned to ranks, is near."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=120)
    y = 0.6 * x + 0.8 * draw.normal(size=120)
    found = rank_correlation(x, y, [0] * 120)
    half = 1.96 * math.sqrt((1 + found.rho**2 / 2) / 117)  # Bonett and Wright (2000)
    expected = math.tanh(math.atanh(found.rho) - half), math.tanh(math.atanh(found.rho) + half)
    assert (found.low, found.high) == pytest.approx(expected, abs=0.04)


def test_what_differs_between_groups_alone_is_as_sure_as_there_are_groups():
    """Two groups of twenty points each are drawn as one of them, half of the time: no correlation, and no interval."""
    x, y, groups = [1] * 20 + [2] * 20, list(range(40)), [0] * 20 + [1] * 20
    assert rank_correlation(x, y, groups, within=False) is None
    many = [group for group in range(12) for _ in range(5)]
    draw = np.random.default_rng(2)
    level = draw.normal(size=12)
    x, y = [level[g] for g in many], [level[g] + draw.normal() for g in many]
    one = rank_correlation(x, y, [0] * 60, within=False)
    clustered = rank_correlation(x, y, many, within=False)
    assert clustered.rho == one.rho
    assert clustered.high - clustered.low > 1.3 * (one.high - one.low)


def test_what_is_too_little_has_no_correlation():
    rising, alone = [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5]
    assert rank_correlation(rising[:5], rising[:5], [0] * 5) is None
    assert rank_correlation([1] * 6, rising, [0] * 6) is None
    assert rank_correlation(rising, rising, alone) is None  # none to rank within
    assert rank_correlation(rising, rising, alone, within=False).rho == pytest.approx(1)
    constant_in_each = rank_correlation([1, 1, 1, 2, 2, 2], rising, [0, 0, 0, 1, 1, 1])
    assert constant_in_each is None


def test_a_group_where_one_value_never_varies_takes_nothing_from_the_others():
    rising = [1, 2, 3, 4, 5, 6]
    found = rank_correlation(rising + [7] * 6, rising + rising, [0] * 6 + [1] * 6)
    assert (found.rho, found.num_points) == (pytest.approx(1), 6)


def test_a_value_that_one_point_alone_has_gives_no_interval():
    """A third of the resamples lack that point and have no correlation; the others all have the same sign."""
    assert rank_correlation([1] * 7 + [2], [1, 2, 3, 4, 5, 6, 7, 8], [0] * 8) is None


def test_the_same_seed_gives_the_same_interval():
    x, y, groups = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8], [0] * 8
    assert rank_correlation(x, y, groups) == rank_correlation(x, y, groups)
    assert rank_correlation(x, y, groups) != rank_correlation(x, y, groups, seed=1)
