"""Full fine-tuning: every weight of a copy trains, ties stay ties, and the base model comes out as it went in."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.nn.functional import cross_entropy

from frozencore.errors import ConfigError
from frozencore.tune.adapters import add_adapter, save_adapter
from frozencore.tune.config import make_config
from frozencore.tune.cost import num_trainable
from frozencore.tune.load import resolve_targets
from frozencore.tune.methods import METHODS, MethodConfig
from frozencore.tune.scoring.forward import unload_adapter
from frozencore.tune.scoring.score import held_out_loss
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import ATTENTION, VOCABULARY, draw_rows, same_tensors, tiny_llama, tiny_qwen2

ROWS = draw_rows(8, seed=5)
RECIPE = Recipe(learning_rate=1e-3, warmup=0.03, epochs=4, batch_size=2, accumulation=1)
TOKENS = torch.arange(3, 15).reshape(2, 6) % VOCABULARY
FULL = METHODS["full"]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def tied_llama() -> nn.Module:
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


MODELS = {"untied": tiny_llama, "tied": tied_llama, "tied, with biases": tiny_qwen2}
EVERY = pytest.mark.parametrize("kind", MODELS)


def adapted(model: Any, **options: Any) -> PeftModel:
    config = make_config(model="pocket", task="pocket-math", method="full", **options)
    return add_adapter(FULL, model, MethodConfig(target_modules=resolve_targets(config.method, model), seed=3))


@EVERY
def test_untrained_it_is_the_base_model_and_trains_every_parameter_once(kind: str) -> None:
    base = MODELS[kind]()
    expected, count = logits(base), sum(parameter.numel() for parameter in base.parameters())
    model = adapted(base)
    assert torch.equal(logits(model), expected)
    assert num_trainable(model) == count


@EVERY
def test_its_first_step_is_that_of_adamw_on_the_plain_model(kind: str) -> None:
    """Trained by hand: every parameter of the model itself, and torch's own optimiser."""
    plain = MODELS[kind]().train()
    optimiser = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    total, num_tokens = torch.zeros(()), 0
    for row in ROWS:
        ids = torch.tensor([row.input_ids])
        targets = ids[0, row.num_context :]
        total = total + cross_entropy(plain(ids).logits[0, row.num_context - 1 : -1], targets, reduction="sum")
        num_tokens += len(targets)
    (total / num_tokens).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimiser.step()
    model = adapted(MODELS[kind]())
    train(model, ROWS, replace(RECIPE, epochs=1, batch_size=8, warmup=0.0), pad_id=0)
    torch.testing.assert_close(logits(model), logits(plain), atol=1e-4, rtol=1e-3)
    assert (logits(model) - logits(MODELS[kind]())).abs().max() > 1e-3


@EVERY
def test_trained_it_reloads_on_the_original_base_which_comes_out_as_it_went_in(kind: str, tmp_path: Path) -> None:
    base = MODELS[kind]()
    original = copy.deepcopy(base.state_dict())
    model = adapted(base)
    train(model, ROWS, RECIPE, pad_id=0)
    trained = logits(model)
    save_adapter(FULL, model, tmp_path / "adapter", tmp_path / "start")
    torch.testing.assert_close(logits(PeftModel.from_pretrained(MODELS[kind](), tmp_path / "adapter")), trained)
    bare = unload_adapter(model)
    assert (trained - logits(bare)).abs().max() > 1e-2
    assert same_tensors(bare.state_dict(), original)
    assert (kind != "untied") == (bare.get_output_embeddings().weight is bare.get_input_embeddings().weight)


def test_with_targets_those_layers_alone_train() -> None:
    weights = [value for key, value in tiny_llama().named_parameters() if any(target in key for target in ATTENTION)]
    assert num_trainable(adapted(tiny_llama(), targets=ATTENTION)) == sum(weight.numel() for weight in weights)
    of_block = [value for key, value in tiny_llama().named_parameters() if "layers.1." in key]
    assert num_trainable(adapted(tiny_llama(), layers=1)) == sum(weight.numel() for weight in of_block)


@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in MODELS), ("untied", {"targets": ATTENTION})])
def test_on_a_16_bit_base_its_weights_are_float32(kind: str, options: dict[str, Any]) -> None:
    model = adapted(MODELS[kind]().to(torch.bfloat16), **options)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    loss_before = held_out_loss(model, ROWS, pad_id=0)
    train(model, ROWS, replace(RECIPE, learning_rate=1e-4), pad_id=0)
    assert held_out_loss(model, ROWS, pad_id=0) < loss_before
    after = [p for p in model.parameters() if p.requires_grad]
    assert not any(torch.equal(*pair) for pair in zip(after, before, strict=True))


def test_quantised_weights_and_a_rank_are_refused_in_a_line() -> None:
    model = tiny_llama()
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"but those of model\.layers\.0\.self_attn\.q_proj are quantised"):
        adapted(model)
    with pytest.raises(ConfigError, match="The method 'full' does not read rank"):
        make_config(model="pocket", task="pocket-math", method="full", rank=4)
