"""Updates that are tried: as if they stood in the weights, and gone afterwards."""

from __future__ import annotations

import pytest
import torch

from adapted import BATCHES
from frozencore.calibration.options import CalibrationOptions
from frozencore.calibration.preserve import preserved
from frozencore.calibration.run_pass import mean_loss
from frozencore.calibration.trial import Update, tried
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
