"""The formulas against PEFT's and the optimiser's own counts."""

from __future__ import annotations

import torch
from peft import get_peft_model

from frozencore import FrozenCoreConfig
from frozencore.tune.cost import basis_bytes, training_state_bytes, values_at_once
from frozencore.tune.training.callbacks import training_state_held
from tiny import tiny_qwen2

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def target_shapes(model: torch.nn.Module) -> list[tuple[int, int]]:
    return [tuple(m.weight.shape) for n, m in model.named_modules() if n.rpartition(".")[2] in TARGETS]


def test_gradients_and_adam_take_twelve_bytes_a_value() -> None:
    model = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=4, target_modules=TARGETS, constructor="random"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    assert training_state_held(optimizer) == training_state_bytes(values_at_once(model)) == 12 * 8 * 4**2


def test_basis_bytes_are_those_of_the_buffers() -> None:
    model = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=4, target_modules=TARGETS, constructor="random"))
    stored = sum(b.nbytes for n, b in model.named_buffers() if "frozencore_P" in n or "frozencore_Q" in n)
    assert basis_bytes(target_shapes(tiny_qwen2()), 4, torch.float32) == stored
