"""PEFT's methods that train a few hundred values: their counts, where they start, what is saved and resumed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn

from frozencore.errors import ConfigError
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import TokenRow
from frozencore.tune.run.config import make_config
from frozencore.tune.run.costs import values_at_once
from frozencore.tune.scoring.forward import take_off
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from resumed import require_bit_equal_resume
from tiny import ATTENTION, VOCABULARY, draw_examples, tiny_gpt2, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(8, seed=5))]
RECIPE = Recipe(learning_rate=3e-2, warmup=0.03, epochs=4, batch_size=2, accumulation=1)
NAMES = ("vera_vectors", "tinylora", "unilora", "ia3", "prompt_tuning")
EVERY = pytest.mark.parametrize("name", NAMES)
OPTIONS = AdapterOptions(rank=3, targets=ATTENTION, seed=3, core={})
TOKENS = torch.arange(3, 15).reshape(2, 6) % VOCABULARY
WIDTH, KEYS, MIDDLE, LAYERS = 32, 16, 48, 2  # of tiny_qwen2


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def adapted(name: str, **changes: object) -> PeftModel:
    return METHODS[name].add(tiny_qwen2(), replace(OPTIONS, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "near"), [("vera_vectors", 1e-5), ("tinylora", 1e-5), ("ia3", 1e-5), ("unilora", 1e-2)]
)
def test_untrained_it_is_the_base_model_and_unilora_nearly_is(name: str, near: float) -> None:
    torch.testing.assert_close(logits(adapted(name)), logits(tiny_qwen2()), atol=near, rtol=0)


@EVERY
def test_trained_it_reloads_on_the_original_base_which_comes_out_as_it_went_in(name: str, tmp_path: Path) -> None:
    model = adapted(name)
    train(model, ROWS, RECIPE, pad_id=0)
    trained = logits(model)
    METHODS[name].save(model, tmp_path / "adapter", tmp_path / "start")

    base = tiny_qwen2()
    original = copy.deepcopy(base.state_dict())
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(reloaded), trained, atol=1e-5, rtol=1e-4)
    bare = take_off(model)
    assert (trained[:, -TOKENS.shape[1] :] - logits(bare)).abs().max() > 1e-2
    for plain in (bare, take_off(reloaded)):
        values = plain.state_dict()
        assert values.keys() == original.keys()
        assert all(torch.equal(values[key], value) for key, value in original.items())


@EVERY
def test_a_resumed_training_is_bit_equal_to_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    require_bit_equal_resume(lambda: adapted(name), ROWS, RECIPE, tmp_path)


@EVERY
def test_the_same_seed_gives_the_same_values_and_leaves_the_global_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, again = adapted(name).state_dict(), adapted(name).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_what_they_train_is_counted_by_their_papers_formulas() -> None:
    outputs = LAYERS * (2 * WIDTH + 2 * KEYS)
    counted = {name: values_at_once(adapted(name)) for name in NAMES}
    assert counted == {
        "vera_vectors": LAYERS * 4 * OPTIONS.rank + outputs,
        "tinylora": LAYERS * 4 * 64,
        "unilora": 256,
        "ia3": outputs,
        "prompt_tuning": OPTIONS.rank * WIDTH,
    }


@pytest.mark.parametrize("targets", [(*ATTENTION, "gate_proj", "up_proj", "down_proj"), "all-linear"])
def test_ia3_scales_the_inputs_of_the_last_feed_forward_projection(targets: object) -> None:
    shapes = {key: value.numel() for key, value in adapted("ia3", targets=targets).named_parameters() if "ia3" in key}
    assert {key.split(".")[-3]: count for key, count in shapes.items()} == {
        "q_proj": WIDTH, "k_proj": KEYS, "v_proj": KEYS, "o_proj": WIDTH, "gate_proj": MIDDLE, "up_proj": MIDDLE,
        "down_proj": MIDDLE,
    }  # fmt: skip
    inputs = [key for key in shapes if "down_proj" in key]
    assert all(dict(adapted("ia3", targets=targets).named_parameters())[key].shape == (1, MIDDLE) for key in inputs)


@pytest.mark.parametrize(
    ("name", "budget", "targets", "trained"),
    [
        ("unilora", 100, ATTENTION, 100),
        ("unilora", "1KB", ATTENTION, 250),
        ("tinylora", 100, ATTENTION, 96),  # 12 a layer
        ("tinylora", 100, "all-linear", 98),  # 7 a layer
        ("tinylora", 5, ATTENTION, 5),  # one vector for all
        ("prompt_tuning", 100, ATTENTION, 96),  # three virtual tokens
    ],
)
def test_a_budget_is_met_or_nearly(name: str, budget: int | str, targets: object, trained: int) -> None:
    assert values_at_once(adapted(name, rank_budget=budget, targets=targets)) == trained


def test_a_budget_of_tinylora_counts_layers_of_a_transposed_kind() -> None:
    model = METHODS["tinylora"].add(tiny_gpt2(), replace(OPTIONS, targets=("c_attn",), rank_budget=100))
    assert values_at_once(model) == 100


def test_wrong_options_are_one_line() -> None:
    with pytest.raises(ConfigError, match="A virtual token of this model is 32 values, but the budget is 31"):
        adapted("prompt_tuning", rank_budget=31)
    for name in NAMES:
        with pytest.raises(ConfigError, match="at least 1, got 0"):
            adapted(name, rank=0)
    for name in ("vera_vectors", "tinylora", "unilora", "ia3"):
        with pytest.raises(ConfigError, match="targets .*nowhere.* cannot carry"):
            adapted(name, targets=("nowhere",))


def test_a_budget_goes_beside_a_rank_where_both_are_free() -> None:
    for name in ("tinylora", "unilora"):
        assert make_config(model="pocket", task="pocket-math", method=name, rank=2, rank_budget=64).rank == 2
    with pytest.raises(ConfigError, match="--rank 2 came too"):
        make_config(model="pocket", task="pocket-math", method="prompt_tuning", rank=2, rank_budget=64)
    for name in ("ia3", "vera_vectors", "lora"):
        with pytest.raises(ConfigError, match=f"but {name!r} has none"):
            make_config(model="pocket", task="pocket-math", method=name, rank_budget=64)
