"""benchmarks/rescale.py: uneven channels of the same function; what whitening makes of them (docs/method.md)."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from adapted import BATCHES, adapted, cores_of
from frozencore.maths.linalg import principal_cosines
from places import ROOT
from tiny import tiny_qwen2

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


def worst_cosine(constructor: str, spread: float, seed: int, **options: Any) -> float:
    """Between what the bases span in the even model and in the uneven one, written in the even one's channels: over
    both sides of q, k, v and o of every layer, the smallest cosine."""
    found = []
    for size in (0.0, spread):
        base = model_of(size, seed)
        gains = [block.input_layernorm.weight.detach().clone() for block in base.model.layers]
        rows = [block.self_attn.v_proj.weight.detach().clone() for block in base.model.layers]
        heads = [block.self_attn for block in base.model.layers]
        found.append((adapted(constructor, model=base, dtype=None, **options), gains, rows, heads))
    (even, gains, rows, _), (uneven, gains_, rows_, heads) = found
    worst = 1.0
    for block in range(len(gains)):
        t = gains_[block] / gains[block]
        u = (rows_[block] * t / rows[block]).mean(1)
        of_side: dict[str, tuple[Tensor | None, Tensor | None]] = {
            "q_proj": (None, t), "k_proj": (None, t), "v_proj": (1 / u, t),
            "o_proj": (None, RESCALE["as_read"](u, heads[block])),
        }  # fmt: skip
        for name, sides in of_side.items():
            one, other = (factors_of(model, f"layers.{block}.self_attn.{name}") for model in (even, uneven))
            for X, Y, factor in zip(one, other, sides, strict=True):
                back = Y if factor is None else Y * factor[:, None]
                worst = min(worst, float(principal_cosines(X, back).min()))
    return worst


def factors_of(model: PeftModel, name: str) -> tuple[Tensor, Tensor]:
    (layer,) = [layer for layer in cores_of(model) if layer.name.endswith(name)]
    return layer.factors("default")[:2]


@pytest.mark.parametrize(("spread", "seed"), [(0.5, 0), (1.0, 1)])
def test_fccas_spans_do_not_see_the_rescaling_and_rawgrads_do(spread: float, seed: int) -> None:
    """In the limit of no damping, which is relative to the mean second moment and so sees the largest channels."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert worst_cosine("fcca", spread, seed, damping=1e-10, target_modules=targets) > 1 - 1e-5
    assert worst_cosine("rawgrad", spread, seed, target_modules=targets) < 0.9
