"""Sums of products over tokens: as exact in half precision as in single, and of a matrix with itself by halves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from frozencore.maths import moments
from frozencore.maths.moments import add_outer


def drawn(num_tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(("num_tokens", "p", "q"), [(200, 50, 30), (300, 37, 37), (5, 8, 3)])
def test_products_of_bfloat16_are_summed_almost_as_in_float32(
    num_tokens: int, p: int, q: int, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if splits and not moments._splits():
        pytest.skip("this CPU rounds what is added to a product of bfloat16")
    monkeypatch.setattr(moments, "_splits", lambda: splits)
    left, right = drawn(num_tokens, p, torch.bfloat16), drawn(num_tokens, q, torch.bfloat16, seed=1)
    for right in (right, left) if p == q else (right,):  # noqa: B020  # and the values with themselves
        start = torch.full((p, q), 3.0)
        total = start.clone()
        add_outer(total, left, right)
        exact = start.double() + left.double().mT @ right.double()
        rounded = float((left.mT @ right - left.double().mT @ right.double()).abs().max())
        assert float((total - exact).abs().max()) < min(rounded / 50, 2e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("width", [40, 41, 2])
def test_a_product_of_values_with_themselves_takes_five_eighths_of_the_products(width: int) -> None:
    values = drawn(24, width, torch.float32)
    total = torch.zeros(width, width)
    with FlopCounterMode(display=False) as counter:
        add_outer(total, values, values)
    torch.testing.assert_close(total.double(), values.double().mT @ values.double(), rtol=1e-5, atol=1e-5)
    assert counter.get_total_flops() <= (0.66 if width > 2 else 1) * 2 * 24 * width * width
