"""A record's criterion of bases: sums, norms and medians over layers with known numbers."""

from __future__ import annotations

import json
import math
from statistics import median

import pytest

from frozencore.maths.capture import Capture
from frozencore.tune.make_record import criterion_of
from frozencore.tune.record import Criterion

LAYERS = {
    "a": Capture(3.0, 5.0, (0.5, 0.4, 0.3, 0.2, 0.1), 1.0, 2.0, 10.0),
    "b": Capture(4.0, 12.0, (0.8, 0.1, 1e-9), 0.75, 4.0, math.inf),
    "silent": Capture(0.0, 0.0, (0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 6.0, math.inf),
}
J = [0.55, 0.65 + 1e-18, 0.0]


@pytest.fixture
def criterion() -> Criterion:
    found = criterion_of(LAYERS)
    assert found is not None
    return found


def test_the_promised_decrease_adds_up_and_gradients_are_one_norm(criterion: Criterion) -> None:
    assert pytest.approx(sum(J)) == criterion.J
    assert criterion.J_share == pytest.approx(sum(J) / 1.75)
    assert criterion.gradient == pytest.approx(5)
    assert criterion.gradient_share == pytest.approx(5 / 13)
    assert criterion.damping == 1e-3


def test_spectra_ranks_and_spreads_are_medians(criterion: Criterion) -> None:
    assert criterion.leading == pytest.approx((0.5, 0.1, 1e-9))  # as far as every layer goes
    assert criterion.last == pytest.approx(median([0.1, 1e-9, 0.0]))
    assert criterion.effective_rank == 2
    assert criterion.participation == pytest.approx(LAYERS["b"].participation)
    assert (criterion.input_spread, criterion.error_spread) == (4.0, None)


def test_layers_stand_side_by_side_in_few_digits(criterion: Criterion) -> None:
    layers = criterion.layers
    assert layers.name == ("a", "b", "silent")
    assert pytest.approx(J) == layers.J
    assert layers.leading == ((0.5, 0.4, 0.3, 0.2), (0.8, 0.1, 1e-9), (0.0,) * 4)
    assert layers.effective_rank == (5, 2, 0)
    assert layers.error_spread == (10.0, None, None)
    third = criterion_of({"x": Capture(1 / 3, 1.0, (1 / 3,), 1.0, 1 / 3, 1.0)})
    assert third is not None
    assert (third.layers.gradient, third.gradient) == ((0.333333,), 1 / 3)
    assert {len(column) for column in layers.content().values()} == {3}


def test_it_is_read_as_it_was_written(criterion: Criterion) -> None:
    assert Criterion.model_validate_json(json.dumps(criterion.content())) == criterion


def test_without_layers_there_is_none() -> None:
    assert criterion_of({}) is None
