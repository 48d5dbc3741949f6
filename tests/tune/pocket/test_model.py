"""The shipped model: small, Qwen2, loadable, and ignorant of the tasks it will be adapted to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from frozencore.tune.load import load_model
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import Row
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.scoring.exact_match import generate_greedily
from frozencore_lab.tasks.pocket_tasks import POCKET_TASKS
from frozencore_lab.tasks.task import Task

NAMED = {"ids": lambda task: task.name}


@pytest.fixture(scope="module")
def shipped() -> tuple[nn.Module, PromptEncoder]:
    model, tokenizer = load_model("pocket", device="cpu")
    return model, PromptEncoder(tokenizer)


def examples(task: Task, num_rows: int | None = None) -> list[Row]:
    rows = task.source.rows("evaluation", None)[:num_rows]
    return [task.to_row(row, f"evaluation-{i}") for i, row in enumerate(rows)]


def continuations(model: nn.Module, encoder: PromptEncoder, prompts: list[str], num_tokens: int) -> list[str]:
    contexts = [encoder.tokenizer(prompt)["input_ids"] for prompt in prompts]
    return [g.text for g in generate_greedily(model, contexts, encoder=encoder, max_new_tokens=num_tokens)]


def test_the_folder_is_complete_and_at_most_eight_megabytes() -> None:
    names = {path.name for path in pocket_model_path().iterdir()}
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert wanted | {"generation_config.json"} <= names
    assert sum(path.stat().st_size for path in pocket_model_path().iterdir()) <= 8_000_000


def test_it_is_a_qwen2_with_grouped_queries_biases_and_float32_weights(
    shipped: tuple[nn.Module, PromptEncoder],
) -> None:
    model, _ = shipped
    assert model.config.model_type == "qwen2"
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.bias is not None
    assert attention.o_proj.bias is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_tokenizer_is_fast_splits_digits_and_loses_nothing(shipped: tuple[nn.Module, PromptEncoder]) -> None:
    tokenizer = shipped[1].tokenizer
    assert tokenizer.is_fast
    assert tokenizer.tokenize("12 + 345") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5"]
    for text in ("Tom has 12 apples.\nClaim: x", "naïve 漢字 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize("task", POCKET_TASKS.values(), **NAMED)
def test_prompts_are_short_and_the_completion_does_not_melt_into_them(
    task: Task, shipped: tuple[nn.Module, PromptEncoder]
) -> None:
    tokenizer = shipped[1].tokenizer
    for example in examples(task):
        whole = tokenizer(example.prompt + example.completion)["input_ids"]
        assert tokenizer(example.prompt)["input_ids"] + tokenizer(example.completion)["input_ids"] == whole
        assert len(whole) <= 64


@pytest.mark.parametrize("task", [t for t in POCKET_TASKS.values() if t.scoring == "choice"], **NAMED)
def test_the_base_model_is_near_chance_on_choices(task: Task, shipped: tuple[nn.Module, PromptEncoder]) -> None:
    model, encoder = shipped
    rows = [row.choices for row in encoder.encode(examples(task, 200)) if row.choices is not None]
    predictions = predict_choices(model, rows, pad_id=encoder.pad_id)
    assert 0.4 <= sum(p.correct for p in predictions) / 200 <= 0.65


def test_the_base_model_does_not_answer_word_problems(shipped: tuple[nn.Module, PromptEncoder]) -> None:
    prompts = [example.prompt for example in examples(POCKET_TASKS["pocket-math"], 20)]
    assert not any(said.startswith(" The answer is:") for said in continuations(*shipped, prompts, 10))


def test_the_base_model_has_the_skills_in_other_clothes(shipped: tuple[nn.Module, PromptEncoder]) -> None:
    assert continuations(*shipped, ["3 + 4 ="], 2)[0].strip() == "7"
    model, encoder = shipped
    (row,) = encoder.encode([Row("a", "Tom enjoyed the film. Tom felt", " happy", (" happy", " sad"))])
    assert row.choices is not None
    (felt,) = predict_choices(model, [row.choices], pad_id=encoder.pad_id)
    assert felt.logprobs[0] > felt.logprobs[1] + 1
