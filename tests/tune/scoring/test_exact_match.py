"""Batched greedy generation against one prompt at a time, one token at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from frozencore.errors import ModelError
from frozencore.tune.load import load_model
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import Row
from frozencore.tune.scoring.exact_match import complete, generate_greedily, predict_numbers
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import tiny_bart, tiny_gpt2, tiny_qwen2

PROMPTS = ["a", "a longer prompt", "what is it?", "12345 and 6"]


def reference_greedy(model: nn.Module, ids: list[int], num_tokens: int, end_id: int) -> tuple[list[int], bool]:
    generated: list[int] = []
    for _ in range(num_tokens):
        with torch.no_grad():
            token = int(model(torch.tensor([ids + generated])).logits[0, -1].argmax())
        if token == end_id:
            return generated, False
        generated.append(token)
    return generated, True


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "bart"])
def test_batches_generate_what_single_prompts_do(encoder: PromptEncoder, byte_model: nn.Module, family: str) -> None:
    model = byte_model
    if family != "qwen2":
        model = {"gpt2": tiny_gpt2, "bart": tiny_bart}[family]()
        model.resize_token_embeddings(300)
    contexts = [encoder.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    generations = generate_greedily(model, contexts, encoder=encoder, max_new_tokens=12)
    model.eval()
    for context, generation in zip(contexts, generations, strict=True):
        ids, truncated = reference_greedy(model, context, 12, encoder.eos_id)
        assert generation.text == encoder.tokenizer.decode(ids, skip_special_tokens=True)
        assert generation.truncated == truncated


def test_a_generation_stops_at_the_end_token(encoder: PromptEncoder, byte_model: nn.Module) -> None:
    context = encoder.tokenizer("hello")["input_ids"]
    ids, _ = reference_greedy(byte_model, context, 6, -1)
    encoder.eos_id = ids[3]
    (generation,) = generate_greedily(byte_model, [context], encoder=encoder, max_new_tokens=6)
    assert not generation.truncated
    assert generation.text == encoder.tokenizer.decode(ids[: ids.index(ids[3])], skip_special_tokens=True)


def test_the_models_own_generation_settings_change_nothing_and_come_back(
    encoder: PromptEncoder, byte_model: nn.Module
) -> None:
    contexts = [encoder.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    expected = generate_greedily(byte_model, contexts, encoder=encoder, max_new_tokens=12)
    own = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=9.0, max_new_tokens=2)
    byte_model.generation_config = own
    assert generate_greedily(byte_model, contexts, encoder=encoder, max_new_tokens=12) == expected
    assert byte_model.generation_config is own


def test_a_generation_ends_where_the_context_does(encoder: PromptEncoder) -> None:
    model = tiny_qwen2(vocab_size=300, max_position_embeddings=10)
    (generation,) = generate_greedily(model, [[5] * 7], encoder=encoder, max_new_tokens=50)
    assert len(encoder.tokenizer(generation.text)["input_ids"]) <= 3 * 3  # a lone byte decodes to a 3-byte mark


def test_what_was_learnt_is_generated_and_compared_as_numbers(encoder: PromptEncoder, byte_model: nn.Module) -> None:
    learnt = [Row(f"row-{i}", f"{i}?", f" The answer is: {said}") for i, said in enumerate(["1,000", "7.0", "x"])]
    rows = encoder.encode(learnt)
    recipe = Recipe(learning_rate=1e-2, warmup=0.03, epochs=60, batch_size=3, accumulation=1)
    train(byte_model, rows, recipe, pad_id=encoder.pad_id)
    asked = [replace(e, completion=f" The answer is: {gold}") for e, gold in zip(learnt, (1000, 8, 9), strict=True)]
    predictions, num_truncated = predict_numbers(byte_model, encoder, encoder.encode(asked), max_new_tokens=30)
    assert [(p.prediction, p.gold, p.correct) for p in predictions] == [
        ("1000", "1000", True),
        ("7", "8", False),
        (None, "9", False),
    ]
    assert [p.text for p in predictions] == [example.completion for example in learnt]
    assert num_truncated == 0


def test_a_token_across_the_end_of_a_prompt_is_generated_and_left_out_of_the_answer() -> None:
    model, tokenizer = load_model("pocket", device="cpu")
    encoder = PromptEncoder(tokenizer, style="plain")
    pairs = [("It is late", "shipping"), ("It is late", "shipped"), ("It is late:", " yes")]
    rows = encoder.encode([Row(str(i), *pair) for i, pair in enumerate(pairs)])
    assert [row.overlap for row in rows] == ["e", "e", ""]  # `es` is a token
    for row, (prompt, _) in zip(rows, pairs, strict=True):
        assert tokenizer.decode(row.input_ids[: row.num_context]) + row.overlap == prompt
    recipe = Recipe(learning_rate=3e-3, warmup=0.1, epochs=60, batch_size=2, accumulation=1)
    train(model, rows[::2], recipe, pad_id=encoder.pad_id)
    found, _ = complete(model, encoder, rows, max_new_tokens=10)
    assert [(p.prediction, p.gold, p.correct) for p in found] == [
        ("shipping", "shipping", True), ("shipping", "shipped", False), ("yes", "yes", True),
    ]  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_generation_from_logits_that_are_not_finite_is_refused(
    value: float, byte_tokenizer: Callable[..., Any], byte_model: nn.Module
) -> None:
    encoder = PromptEncoder(byte_tokenizer(), style="plain", max_length=64)
    model = copy.deepcopy(byte_model)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = value
    with pytest.raises(ModelError, match="not finite.*core that is too large"):
        generate_greedily(model, [[5, 6, 7]], encoder=encoder, max_new_tokens=4)
