"""benchmarks/rescale.py: uneven channels of the same function; what whitening makes of them (docs/method.md)."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fixtures import ROOT
from tiny import BATCHES, tiny_qwen2

RESCALE: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "rescale.py"))
rescale: Callable[..., None] = RESCALE["rescale"]


def model_of(spread: float, seed: int = 0) -> Any:
    """Grouped heads, a bias on v, gains that are not 1; rescaled by one draw whatever the spread."""
    model = tiny_qwen2().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    rescale(model, spread, seed=seed)
    return model


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**{key: value for key, value in BATCHES[0].items() if key != "labels"}).logits


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
def test_the_function_stays_and_the_channels_spread(spread: float) -> None:
    even, uneven = model_of(0.0), model_of(spread)
    torch.testing.assert_close(logits_of(uneven), logits_of(even), rtol=1e-9, atol=1e-9)
    for one, other in zip(even.model.layers, uneven.model.layers, strict=True):
        t = other.input_layernorm.weight / one.input_layernorm.weight
        assert float(t.log().std()) == pytest.approx(spread, rel=0.35)


def test_no_spread_changes_no_bit() -> None:
    before, after = tiny_qwen2(), tiny_qwen2()
    rescale(after, 0.0)
    assert all(torch.equal(*pair) for pair in zip(before.parameters(), after.parameters(), strict=True))


def test_sixteen_bits_and_other_architectures_are_refused() -> None:
    for model in (tiny_qwen2().bfloat16(), nn.Linear(3, 3)):
        with pytest.raises(SystemExit, match="float32"):
            rescale(model, 1.0)
