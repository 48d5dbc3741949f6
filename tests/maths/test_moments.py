"""Sums, means and counts of one layer; products over tokens as exact in half precision as in single."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from frozencore.errors import CalibrationError
from frozencore.maths import moments as summing
from frozencore.maths.moments import LayerMoments, add_outer, max_over_median
from references import numpy_of
from tiny import drawn_layer


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


ONES = torch.ones(2)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: LayerMoments(1, input_square=ONES) + LayerMoments(1, error_square=ONES), "of the same kind add up"),
    (lambda: LayerMoments(3, input_square=ONES).G, "'cross' is needed here but was not collected.*: input_square"),
    *((lambda bad=bad: LayerMoments(3, input_square=torch.tensor([1.0, bad])).a, "'input_square' has NaN or Inf")
      for bad in (math.nan, math.inf, -math.inf)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_sums_that_give_no_mean_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        call()


def test_spread_is_maximum_over_median() -> None:
    assert max_over_median(torch.tensor([1.0, 2.0, 3.0, 40.0, 2.0])) == 20.0
    assert max_over_median(torch.tensor([0.0, 0.0, 1.0])) == math.inf


def test_shapes_are_checked_in_the_tests() -> None:
    """The import hook of conftest.py is at work."""
    with pytest.raises(TypeCheckError):
        LayerMoments(1, cross=torch.ones(3, 2), input_square=torch.ones(3))


def rows(num_tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(("num_tokens", "p", "q"), [(200, 50, 30), (300, 37, 37), (5, 8, 3)])
def test_products_of_bfloat16_are_summed_almost_as_in_float32(
    num_tokens: int, p: int, q: int, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if splits and not summing._splits():
        pytest.skip("this CPU rounds what is added to a product of bfloat16")
    monkeypatch.setattr(summing, "_splits", lambda: splits)
    monkeypatch.setattr(summing, "MANY", 1)
    left, right = rows(num_tokens, p, torch.bfloat16), rows(num_tokens, q, torch.bfloat16, seed=1)
    for right in (right, left) if p == q else (right,):  # noqa: B020  # and the values with themselves
        start = torch.full((p, q), 3.0)
        total = start.clone()
        add_outer(total, left, right)
        exact = start.double() + left.double().mT @ right.double()
        rounded = float((left.mT @ right - left.double().mT @ right.double()).abs().max())
        assert float((total - exact).abs().max()) < min(rounded / 50, 2e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("width", [40, 41, 2])
def test_a_product_of_values_with_themselves_takes_five_eighths_of_the_products(width: int) -> None:
    values = rows(24, width, torch.float32)
    total = torch.zeros(width, width)
    with FlopCounterMode(display=False) as counter:
        add_outer(total, values, values)
    torch.testing.assert_close(total.double(), values.double().mT @ values.double(), rtol=1e-5, atol=1e-5)
    assert counter.get_total_flops() <= (0.66 if width > 2 else 1) * 2 * 24 * width * width
