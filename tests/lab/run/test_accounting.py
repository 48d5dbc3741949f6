"""The formulas against PEFT's and the optimiser's own counts."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from forked import ended
from frozencore import FrozenCoreConfig
from frozencore.lab.run import accounting
from frozencore.lab.run.accounting import (
    basis_bytes,
    core_parameters,
    dora_parameters,
    lora_parameters,
    optimizer_state_bytes,
    peak_memory_bytes,
    trainable_parameters,
    training_state_bytes,
)
from tiny import tiny_qwen2

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def target_shapes(model: torch.nn.Module) -> list[tuple[int, int]]:
    return [tuple(m.weight.shape) for n, m in model.named_modules() if n.rpartition(".")[2] in TARGETS]


@pytest.mark.parametrize("rank", [4, 24])
def test_formulas_count_what_peft_makes_trainable(rank: int) -> None:
    shapes = target_shapes(tiny_qwen2())
    core = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=rank, target_modules=TARGETS, constructor="random"))
    lora = get_peft_model(tiny_qwen2(), LoraConfig(r=rank, target_modules=TARGETS))
    dora = get_peft_model(tiny_qwen2(), LoraConfig(r=rank, target_modules=TARGETS, use_dora=True))
    assert core_parameters(shapes, rank) == trainable_parameters(core)
    assert lora_parameters(shapes, rank) == trainable_parameters(lora)
    assert dora_parameters(shapes, rank) == trainable_parameters(dora)


def test_gradients_and_adam_take_twelve_bytes_a_value() -> None:
    model = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=4, target_modules=TARGETS, constructor="random"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert gradients + optimizer_state_bytes(optimizer) == training_state_bytes(trainable_parameters(model))


def test_basis_bytes_are_those_of_the_buffers() -> None:
    model = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=4, target_modules=TARGETS, constructor="random"))
    stored = sum(b.nbytes for n, b in model.named_buffers() if "frozencore_P" in n or "frozencore_Q" in n)
    assert basis_bytes(target_shapes(tiny_qwen2()), 4, torch.float32) == stored


def test_peak_memory_sees_what_was_held_and_let_go(tmp_path: Path) -> None:
    """In a process of its own: this one's peak may lie far above what a test can add."""

    def hold_a_quarter_of_a_gibibyte() -> None:
        before = peak_memory_bytes()
        block = torch.ones(2**26)
        del block
        grown = peak_memory_bytes() - before
        assert 0.5 * 2**28 < grown < 2 * 2**28, grown

    done = ended(hold_a_quarter_of_a_gibibyte, tmp_path)
    assert done.status == 0, done.err[-500:]


def test_with_gpus_the_fullest_of_them_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {0: 5, 1: 9, 2: 7}.__getitem__)
    assert peak_memory_bytes() == 9


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_without_proc_the_peak_is_the_systems_own_count_in_its_unit(
    platform: str, unit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accounting, "Path", lambda _: tmp_path / "nothing")
    monkeypatch.setattr(sys, "platform", platform)
    peak = peak_memory_bytes()
    assert peak == unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
