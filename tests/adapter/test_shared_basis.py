"""Adapters on one basis: one P and one Q in memory, and rows of a batch through cores of their own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn

from adapted import BATCHES, adapted, logits, train_at_random
from frozencore import get_bases, set_bases
from frozencore.adapter.layer import frozen_core_layers
from tiny import tiny_qwen2

PROMPT = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
ROWS = ["a", "__base__", "b", "a"]


def on_one_basis(*names: str) -> PeftModel:
    """Adapters of trained cores on the bases of the first."""
    model = adapted("fcca")
    first = model.peft_config["default"]
    bases = get_bases(model)
    for seed, name in enumerate(names):
        model.add_adapter(name, copy.deepcopy(first))
        set_bases(model, bases, adapter_name=name)
        train_at_random(model, name, seed=seed)
    model.delete_adapter("default")
    model.set_adapter(names[0])
    return model.eval()


def holders(model: nn.Module, *names: str) -> list[set[int]]:
    """The storage of P, and of Q, under each name, layer by layer."""
    pointers = []
    for layer in frozen_core_layers(model, names[0]).values():
        for side in (layer.frozencore_P, layer.frozencore_Q):
            pointers.append({side[name].data_ptr() for name in names})
    return pointers


def test_adapters_on_one_basis_hold_one_tensor_a_side() -> None:
    assert all(len(held) == 1 for held in holders(on_one_basis("a", "b", "c"), "a", "b", "c"))


@pytest.mark.parametrize("low_memory", [False, True])
def test_adapters_that_were_loaded_share_too(low_memory: bool, tmp_path: Path) -> None:
    model = on_one_basis("a", "b")
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(
        tiny_qwen2(), str(tmp_path / "a"), adapter_name="a", low_cpu_mem_usage=low_memory
    )
    loaded.load_adapter(str(tmp_path / "b"), adapter_name="b", low_cpu_mem_usage=low_memory)
    assert all(len(held) == 1 for held in holders(loaded, "a", "b"))
    for name in ("a", "b"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        assert torch.equal(logits(loaded.eval()), logits(model))


def test_moving_and_casting_keeps_them_one() -> None:
    model = on_one_basis("a", "b").to(torch.float64)
    assert all(len(held) == 1 for held in holders(model, "a", "b"))


def test_a_new_basis_for_one_leaves_the_other_its_own() -> None:
    model = on_one_basis("a", "b")
    model.set_adapter("b")
    before = logits(model)
    others = get_bases(adapted("random"))
    set_bases(model, others, adapter_name="a", reset=True)
    assert torch.equal(logits(model), before)
    assert all(len(held) == 2 for held in holders(model, "a", "b"))
    assert all(torch.equal(got, others[name]) for name, got in get_bases(model, "a").items())


def test_loading_a_state_into_one_leaves_the_other_its_own() -> None:
    model = on_one_basis("a", "b")
    model.set_adapter("b")
    before = logits(model)
    state = model.state_dict()
    changed = {key: torch.randn_like(value) for key, value in state.items() if "frozencore_P.a" in key}
    model.load_state_dict(changed, strict=False)
    assert torch.equal(logits(model), before)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in changed.items())


def test_deleting_one_leaves_the_other() -> None:
    model = on_one_basis("a", "b")
    model.set_adapter("b")
    before = logits(model)
    model.delete_adapter("a")
    assert torch.equal(logits(model), before)


def alone(model: PeftModel, name: str) -> torch.Tensor:
    if name == "__base__":
        with model.disable_adapter():
            return logits(model)
    model.set_adapter(name)
    return logits(model)


def test_each_row_goes_through_its_own_core() -> None:
    model = on_one_basis("a", "b")
    mixed = model(**PROMPT, adapter_names=ROWS).logits
    for row, name in enumerate(ROWS):
        torch.testing.assert_close(mixed[row], alone(model, name)[row], rtol=1e-5, atol=1e-5)


def test_rows_of_the_base_model_alone_are_the_base_models_bits() -> None:
    model = on_one_basis("a", "b")
    mixed = model(**PROMPT, adapter_names=["__base__"] * 4).logits
    assert torch.equal(mixed, alone(model, "__base__"))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_keeps_the_rows_apart(num_beams: int) -> None:
    model = on_one_basis("a", "b")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": num_beams}
    mixed = model.generate(**PROMPT, adapter_names=ROWS, **options)
    for name in ("a", "b"):
        model.set_adapter(name)
        rows = [row for row, own in enumerate(ROWS) if own == name]
        assert torch.equal(model.generate(**PROMPT, **options)[rows], mixed[rows])


def test_a_mixed_batch_trains_each_core_on_its_own_rows() -> None:
    model = on_one_basis("a", "b").train()
    for parameter in model.parameters():
        parameter.requires_grad_("frozencore_R" in "".join(n for n, p in model.named_parameters() if p is parameter))
    labels = PROMPT["input_ids"].masked_fill(PROMPT["attention_mask"] == 0, -100)

    def gradients(rows: list[int], names: list[str]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        output = model(**{key: value[rows] for key, value in PROMPT.items()}, adapter_names=names).logits
        loss = nn.functional.cross_entropy(
            output[:, :-1].flatten(0, 1), labels[rows][:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    together = gradients([0, 1, 2, 3], ROWS)
    for name, rows in (("a", [0, 3]), ("b", [2])):
        for key, gradient in gradients(rows, [name] * len(rows)).items():
            if f"frozencore_R.{name}." in key:
                torch.testing.assert_close(together[key], gradient, rtol=1e-4, atol=1e-6)


def test_a_merged_adapter_refuses_rows_of_their_own() -> None:
    model = on_one_basis("a", "b")
    model.merge_adapter(["a"])
    with pytest.raises(ValueError, match="merged adapters, please call `unmerge_adapter` first"):
        model(**PROMPT, adapter_names=ROWS)
    model.unmerge_adapter()
    model(**PROMPT, adapter_names=ROWS)


def test_a_batch_of_another_size_is_refused_and_nothing_stays() -> None:
    model = on_one_basis("a", "b")
    before = logits(model)
    with pytest.raises(ValueError, match="Length of"):
        model(**PROMPT, adapter_names=["a"] * 3)
    assert torch.equal(logits(model), before)
