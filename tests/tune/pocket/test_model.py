"""The shipped model: small, Qwen2, loadable, and ignorant of the tasks it will be adapted to."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from frozencore.tune.pocket import POCKET_TASKS, pocket_model_path
from frozencore.tune.rows import Example

NUM_SCORED = 200


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(pocket_model_path()).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(pocket_model_path())


def log_likelihood(model, tokenizer, prompt: str, completion: str) -> float:
    """Natural-log probability of the completion's tokens after the prompt."""
    prompt_ids, completion_ids = tokenizer(prompt)["input_ids"], tokenizer(completion)["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt_ids + completion_ids])).logits[0]
    predicted = logits[len(prompt_ids) - 1 : -1].log_softmax(-1)
    return predicted[range(len(completion_ids)), completion_ids].sum().item()


def continuation(model, tokenizer, prompt: str, num_tokens: int) -> str:
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_folder_is_complete_and_at_most_eight_megabytes() -> None:
    names = {path.name for path in pocket_model_path().iterdir()}
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert wanted | {"generation_config.json"} <= names
    assert sum(path.stat().st_size for path in pocket_model_path().iterdir()) <= 8_000_000


def test_it_is_a_qwen2_with_grouped_queries_biases_and_float32_weights(model) -> None:
    config = AutoConfig.from_pretrained(pocket_model_path())
    assert config.model_type == "qwen2"
    assert config.num_key_value_heads < config.num_attention_heads
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.bias is not None
    assert attention.o_proj.bias is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_tokenizer_is_fast_splits_digits_and_loses_nothing(tokenizer) -> None:
    assert tokenizer.is_fast
    assert tokenizer.tokenize("12 + 345") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5"]
    for text in ("Tom has 12 apples.\nClaim: x", "naïve 漢字 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize("task", POCKET_TASKS.values(), ids=lambda task: task.name)
def test_prompts_are_short_and_the_completion_does_not_melt_into_them(task, tokenizer) -> None:
    for i, row in enumerate(task.source.rows("evaluation", None)):
        example: Example = task.to_example(row, f"evaluation-{i}")
        whole = tokenizer(example.prompt + example.completion)["input_ids"]
        assert tokenizer(example.prompt)["input_ids"] + tokenizer(example.completion)["input_ids"] == whole
        assert len(whole) <= 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [t for t in POCKET_TASKS.values() if t.scoring == "choice"], ids=lambda task: task.name
)
def test_the_base_model_is_near_chance_on_choices(task, model, tokenizer) -> None:
    right = 0
    for i, row in enumerate(task.source.rows("evaluation", None)[:NUM_SCORED]):
        example = task.to_example(row, f"evaluation-{i}")
        scores = {c: log_likelihood(model, tokenizer, example.prompt, c) for c in example.choices}
        right += max(scores, key=scores.__getitem__) == example.completion
    assert 0.4 <= right / NUM_SCORED <= 0.65


def test_the_base_model_does_not_answer_word_problems(model, tokenizer) -> None:
    task = POCKET_TASKS["pocket-math"]
    for i, row in enumerate(task.source.rows("evaluation", None)[:20]):
        example = task.to_example(row, f"evaluation-{i}")
        assert not continuation(model, tokenizer, example.prompt, 10).startswith(" The answer is:")


def test_the_base_model_has_the_skills_in_other_clothes(model, tokenizer) -> None:
    assert continuation(model, tokenizer, "3 + 4 =", 2).strip() == "7"
    happy = log_likelihood(model, tokenizer, "Tom enjoyed the film. Tom felt", " happy")
    assert happy > log_likelihood(model, tokenizer, "Tom enjoyed the film. Tom felt", " sad") + 1
