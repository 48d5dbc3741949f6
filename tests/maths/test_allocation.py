"""Ranks from gains and a budget, against every possible choice of ranks on small cases."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frozencore.errors import ConfigError
from frozencore.maths.allocation import allocate_ranks, allocations, num_candidates, num_values, uniform_ranks

GAINS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 10)), max_size=4)


def worth(gains: dict[str, list[float]], ranks: dict[str, int]) -> float:
    return sum(sum(own[: ranks[name]]) for name, own in gains.items())


def best_possible(gains: dict[str, list[float]], budget: int) -> float:
    choices = product(*(range(len(own) + 1) for own in gains.values()))
    fitting = (dict(zip(gains, choice, strict=True)) for choice in choices if sum(r * r for r in choice) <= budget)
    return max(worth(gains, ranks) for ranks in fitting)


@given(st.lists(GAINS, min_size=1, max_size=4), st.integers(1, 40))
def test_ranks_fit_the_budget_and_are_worth_the_best_but_one_step(own: list[list[float]], budget: int) -> None:
    gains = {str(number): layer for number, layer in enumerate(own)}
    ranks = allocate_ranks(gains, budget)
    assert list(ranks) == list(gains)
    assert num_values(ranks) <= budget
    assert all(ranks[name] <= len(layer) for name, layer in gains.items())
    largest_step = max(sum(layer) for layer in own)
    best = best_possible(gains, budget)
    assert best - largest_step - 1e-9 <= worth(gains, ranks) <= best + 1e-9


@given(st.lists(st.lists(st.floats(0.01, 10), max_size=4), min_size=1, max_size=4))
def test_where_the_best_steps_spend_the_budget_nothing_is_worth_more(own: list[list[float]]) -> None:
    gains = {str(number): sorted(layer, reverse=True) for number, layer in enumerate(own)}
    for budget in range(1, sum(len(layer) ** 2 for layer in own) + 1):
        ranks = allocate_ranks(gains, budget)
        rates = [gains[name][r] / (2 * r + 1) for name, r in ranks.items() if r < len(gains[name])]
        paid = [gains[name][r - 1] / (2 * r - 1) for name, r in ranks.items() if r]
        if num_values(ranks) == budget and min(paid) >= max(rates, default=0):  # no exchange can help
            assert worth(gains, ranks) == pytest.approx(best_possible(gains, budget))


def test_a_direction_is_bought_at_the_price_of_the_next_square() -> None:
    gains = {"steep": [9.0, 3.0, 1.0], "flat": [2.0, 2.0, 2.0]}
    assert [allocate_ranks(gains, budget) for budget in (1, 2, 5, 8)] == [
        {"steep": 1, "flat": 0},  # 9 for one value
        {"steep": 1, "flat": 1},  # 2 for one value
        {"steep": 2, "flat": 1},  # 3 for three values against 2 for three
        {"steep": 2, "flat": 2},
    ]


def test_a_worthless_direction_is_bought_for_the_sake_of_the_next_one_alone() -> None:
    assert allocate_ranks({"late": [0.0, 8.0]}, 4) == {"late": 2}
    assert allocate_ranks({"late": [0.0, 8.0]}, 3) == {"late": 0}
    assert allocate_ranks({"none": [0.0, 0.0], "some": [1.0, 0.0]}, 100) == {"none": 0, "some": 1}


def test_what_is_left_goes_to_the_best_step_that_fits() -> None:
    gains = {"wide": [1.0, 30.0], "narrow": [4.0, 0.5]}  # both directions of the wide one, 7.75 a value, take four
    assert allocate_ranks(gains, 4) == {"wide": 2, "narrow": 0}
    assert allocate_ranks(gains, 3) == {"wide": 1, "narrow": 1}


def test_without_spectra_ranks_are_equal_and_narrow_layers_pay_for_wide_ones() -> None:
    shapes = {"q": (32, 32), "k": (2, 32), "v": (32, 5)}
    assert uniform_ranks(shapes, 27) == {"q": 3, "k": 2, "v": 3}
    assert uniform_ranks(shapes, 61) == {"q": 5, "k": 2, "v": 5}
    for all_that_fits in (10_000, 10**40):  # no longer than for a small budget
        assert uniform_ranks(shapes, all_that_fits) == {"q": 32, "k": 2, "v": 5}
    with pytest.raises(ConfigError, match=r"Rank 1 in each of the 3 layers takes 3 values, but the rank budget is 2\."):
        uniform_ranks(shapes, 2)


def test_no_more_directions_are_looked_at_than_can_be_had() -> None:
    assert num_candidates((64, 48), 10, 4000) == 48
    assert num_candidates((64, 48), 10, 400) == 20  # of the whole budget
    assert num_candidates((640, 480), 100, 10_000) == 40  # four times the equal rank
    assert num_candidates((640, 480), 100, 50) == 4  # also where there is less than one for each


def test_several_budgets_at_once_are_spent_as_one_after_the_other() -> None:
    gains = {"late": [0.0, 8.0, 1.0], "some": [3.0, 1.0], "none": [0.0]}
    assert allocations(gains, [1, 4, 6, 100]) == [allocate_ranks(gains, budget) for budget in (1, 4, 6, 100)]
