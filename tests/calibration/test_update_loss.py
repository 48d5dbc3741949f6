"""Updates that are tried: as if they stood in the weights, and gone afterwards."""

from __future__ import annotations

import pytest
import torch

from adapted import BATCHES
from frozencore.calibration.batches import put_together
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.preserve import preserved
from frozencore.calibration.update_loss import (
    NotSideBySideError,
    Update,
    mean_loss,
    mean_losses,
    tried,
    tried_side_by_side,
)
from tiny import tiny_gpt2, tiny_qwen2

NAMES = {"qwen2": "model.layers.0.self_attn.k_proj", "gpt2": "transformer.h.0.attn.c_attn"}


@pytest.mark.parametrize("kind", NAMES)
def test_the_loss_is_that_of_a_model_with_the_update_in_its_weight(kind: str) -> None:
    model = tiny_qwen2() if kind == "qwen2" else tiny_gpt2()
    layer = model.get_submodule(NAMES[kind])
    n, m = layer.weight.shape if kind == "gpt2" else layer.weight.shape[::-1]
    generator = torch.Generator().manual_seed(0)
    update = Update(torch.randn(m, 2, generator=generator), torch.randn(n, 2, generator=generator)).times(0.5)
    with preserved(model):
        before = mean_loss(model, BATCHES, CalibrationOptions())
        with tried({"k": layer}, {"k": update}):
            found = mean_loss(model, BATCHES, CalibrationOptions())
        assert mean_loss(model, BATCHES, CalibrationOptions()) == before
        with torch.no_grad():
            dense = update.L @ update.Q.mT
            layer.weight += dense.mT if kind == "gpt2" else dense
        assert found == pytest.approx(mean_loss(model, BATCHES, CalibrationOptions()), rel=1e-5)
    assert abs(found - before) > 1e-3


def test_an_error_leaves_no_update_behind() -> None:
    model = tiny_qwen2()
    layer = model.get_submodule(NAMES["qwen2"])
    with pytest.raises(KeyboardInterrupt), tried({"k": layer}, {"k": Update(torch.ones(16, 1), torch.ones(32, 1))}):
        raise KeyboardInterrupt
    assert not layer._forward_hooks


def test_the_loss_is_the_mean_over_examples_of_the_mean_over_their_completions() -> None:
    model = tiny_qwen2().eval()
    losses = []
    for batch in BATCHES:
        for row in range(len(batch["input_ids"])):
            losses.append(model(**{name: tensor[row : row + 1] for name, tensor in batch.items()}).loss.item())
    with preserved(model):
        assert mean_loss(model, BATCHES, CalibrationOptions()) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_updates_side_by_side_give_each_copy_of_the_rows_its_own_loss() -> None:
    """Updates of two ranks, and one of a layer that the others leave unchanged."""
    model = tiny_qwen2()
    layers = {name: model.get_submodule(name) for name in (NAMES["qwen2"], "model.layers.1.mlp.down_proj")}
    generator = torch.Generator().manual_seed(0)

    def update(layer: torch.nn.Module, rank: int) -> Update:
        m, n = layer.weight.shape
        return Update(torch.randn(m, rank, generator=generator), torch.randn(n, rank, generator=generator)).times(0.5)

    first, second = layers.values()
    updates = [{"k": update(first, 2)}, {}, {"k": update(first, 3), "down": update(second, 1)}]
    named, options = {"k": first, "down": second}, CalibrationOptions()
    with preserved(model):
        with tried_side_by_side(named, updates):
            found = mean_losses(model, BATCHES, options, len(updates))
        for own, loss in zip(updates, found, strict=True):
            with tried(named, own):
                assert loss == pytest.approx(mean_loss(model, BATCHES, options), rel=1e-5)
    assert len({round(loss, 3) for loss in found}) == 3
    assert not any(layer._forward_hooks for layer in layers.values())


def test_a_layer_that_does_not_see_rows_of_tokens_says_so() -> None:
    layer = torch.nn.Linear(4, 3)
    updates = [{"one": Update(torch.ones(3, 1), torch.ones(4, 1))}] * 2
    with tried_side_by_side({"one": layer}, updates):
        layer(torch.ones(2, 5, 4))
        for other in (torch.ones(10, 4), torch.ones(3, 5, 4)):
            with pytest.raises(NotSideBySideError):
                layer(other)


def test_short_batches_are_put_together_in_their_order_and_others_are_left_alone() -> None:
    short = [batch for batch in BATCHES for _ in range(2)]
    tokens = short[0]["input_ids"].numel()
    together = put_together(short, 3 * tokens)
    assert 1 < len(together) < len(short)
    assert all(batch["input_ids"].numel() <= 3 * tokens for batch in together)
    assert rows_of(short) == rows_of(together)
    model = tiny_qwen2()
    with preserved(model):
        losses = [mean_loss(model, batches, CalibrationOptions()) for batches in (short, together)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    images = [{"pixel_values": torch.ones(2, 3), "labels": torch.ones(2)}] * 2
    assert put_together(images, 10**6) == images
    assert put_together([], 10) == []


def rows_of(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    """Without padding."""
    pairs = [pair for batch in batches for pair in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    return [row[mask.bool()].tolist() for row, mask in pairs]
