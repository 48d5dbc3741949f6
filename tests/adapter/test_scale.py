"""The length of a step of AdamW under the scale s = alpha / r, and a scale as a factor of the learning rate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from adapted import BATCHES, adapted, cores_of
from tiny import tiny_qwen2


def after_steps(model: nn.Module, rate: float, num_steps: int) -> dict[str, Tensor]:
    """``s·P R Qᵀ`` by layer after steps of AdamW on the model's own loss, without weight decay."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate, weight_decay=0.0)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(**BATCHES[step % len(BATCHES)]).loss.backward()
        optimizer.step()
    return {layer.name: layer.get_delta_weight("default").detach() for layer in cores_of(model)}


@pytest.mark.parametrize("rank", [2, 5, 12])
@pytest.mark.parametrize("width", [32, 64])
def test_the_first_step_is_as_long_at_every_rank_and_width(rank: int, width: int) -> None:
    base = tiny_qwen2(hidden_size=width, intermediate_size=2 * width)
    model = adapted("fcca", model=base, r=rank, alpha=16.0, target_modules="all-linear")
    for update in after_steps(model, 1e-3, 1).values():
        assert float(update.norm()) == pytest.approx(16 * 1e-3, rel=1e-2)  # of a scale of 1 it is r times the rate


def test_a_scale_is_a_factor_of_the_rate() -> None:
    scaled = after_steps(adapted("fcca", r=4, alpha=12.0), 1e-3, 3)
    faster = after_steps(adapted("fcca", r=4), 3e-3, 3)
    for name, update in scaled.items():
        torch.testing.assert_close(update, faster[name], atol=2e-5, rtol=1e-3)
        assert update.norm() > 1e-2
