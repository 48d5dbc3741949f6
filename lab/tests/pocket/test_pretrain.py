"""The pretraining script, run for a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from frozencore.errors import TrainingError
from frozencore.tune.pocket import pocket_model_path
from pretrain import (
    PretrainingRecipe,
    batches,
    new_model,
    pocket_config,
    pretrain,
    train_step,
)

TINY = replace(PretrainingRecipe(), window=32, batch=4, num_corpus_tokens=20_000, num_tokenizer_documents=500)
SMALLEST = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip


def smallest(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    return Qwen2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SMALLEST)


@pytest.fixture(scope="module", autouse=True)
def _smallest_model() -> Iterator[None]:
    """A step of the shipped model's size takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretrain.pocket_config", smallest)
        yield


@pytest.fixture(scope="module")
def two_runs(_smallest_model: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    outs = tuple(tmp_path_factory.mktemp("pretrain") / name for name in ("first", "second"))
    for out in outs:
        pretrain(out, recipe=TINY, num_steps=8)
    return outs[0], outs[1]


def test_the_script_makes_a_model_of_the_shipped_ones_sizes() -> None:
    made = pocket_config(AutoTokenizer.from_pretrained(pocket_model_path())).to_dict()
    shipped = AutoConfig.from_pretrained(pocket_model_path()).to_dict()
    told = {"_name_or_path", "architectures", "dtype", "transformers_version"}  # by saving
    assert {name: made[name] for name in made.keys() - told} == {name: shipped[name] for name in made.keys() - told}


def test_the_same_seed_gives_the_same_weights(two_runs: tuple[Path, Path]) -> None:
    first, second = (AutoModelForCausalLM.from_pretrained(out).state_dict() for out in two_runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_folder_loads_and_nothing_is_left_beside_it(two_runs: tuple[Path, Path]) -> None:
    for out in two_runs:
        assert AutoTokenizer.from_pretrained(out).eos_token == "<|endoftext|>"
        assert [path.name for path in out.parent.iterdir()] == [out.name]
        assert "not** a reproduction" in (out / "README.md").read_text()


def test_every_pass_over_the_windows_is_whole_and_in_an_order_of_its_own() -> None:
    windows = torch.arange(12).view(12, 1)
    recipe = replace(TINY, batch=4)
    first, second = (list(islice(batches(windows, recipe), 6)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    passes = [torch.cat(first[i : i + 3]).flatten().tolist() for i in (0, 3)]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(12))


def test_a_loss_that_is_not_finite_stops_before_anything_is_updated() -> None:
    model, optimizers = new_model(TINY, Qwen2Config(vocab_size=40, **SMALLEST))
    model.model.norm.weight.data[0] = torch.nan
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(TrainingError, match="must stay finite, but it became nan. Lower the learning rate"):
        train_step(model, optimizers, torch.arange(20).view(2, 10))
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.nan_to_num(7.0), value.nan_to_num(7.0))
