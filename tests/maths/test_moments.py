"""Sums, means and counts of one layer."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from drawn import drawn_layer
from frozencore.errors import CalibrationError
from frozencore.maths.moments import LayerMoments, spread
from references import numpy_of


def test_properties_are_means_over_tokens() -> None:
    layer = drawn_layer()
    moments, expected = layer.moments(), layer.reference()
    for name, mean in (("G", expected.G), ("A", expected.A), ("D", expected.D)):
        np.testing.assert_allclose(numpy_of(getattr(moments, name)), mean, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(numpy_of(moments.a), np.diag(expected.A), rtol=1e-10)
    np.testing.assert_allclose(numpy_of(moments.d), np.diag(expected.D), rtol=1e-10)


def test_moments_of_two_parts_add_up_to_those_of_the_whole() -> None:
    whole = drawn_layer(num_tokens=50)
    first = dataclasses.replace(whole, X=whole.X[:20], E=whole.E[:20]).moments()
    second = dataclasses.replace(whole, X=whole.X[20:], E=whole.E[20:]).moments()
    together, expected = first + second, whole.moments()
    assert together.num_tokens == 50
    for name in expected.names():
        torch.testing.assert_close(getattr(together, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


def test_moments_of_different_kinds_do_not_add_up() -> None:
    with pytest.raises(CalibrationError, match="Only moments of the same kind add up"):
        LayerMoments(1, input_square=torch.ones(2)) + LayerMoments(1, error_square=torch.ones(2))


def test_a_moment_that_was_not_collected_is_named_with_what_was() -> None:
    moments = LayerMoments(3, input_square=torch.ones(2))
    with pytest.raises(CalibrationError, match=r"'cross' is needed here but was not collected.*were: input_square"):
        _ = moments.G


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_moment_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(CalibrationError, match="'input_square' holds NaN or Inf"):
        _ = LayerMoments(3, input_square=torch.tensor([1.0, bad])).a


def test_moments_of_no_token_have_no_mean() -> None:
    with pytest.raises(CalibrationError, match="at least one counted token"):
        _ = LayerMoments(0, input_square=torch.ones(2)).a


def test_spread_is_maximum_over_median() -> None:
    assert spread(torch.tensor([1.0, 2.0, 3.0, 40.0, 2.0])) == 20.0
    assert spread(torch.tensor([0.0, 0.0, 1.0])) == math.inf


def test_shapes_are_checked_in_the_tests() -> None:
    """The import hook of conftest.py is at work."""
    with pytest.raises(TypeCheckError):
        LayerMoments(1, cross=torch.ones(3, 2), input_square=torch.ones(3))
