"""A prompt-tuned model is scored as one whose first embeddings are put there by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import ChoiceTokens, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.choice import choice_logprobs
from frozencore.tune.scoring.exact_match import generate_greedily
from frozencore.tune.scoring.forward import num_virtual_tokens, take_off
from frozencore.tune.scoring.score import held_out_loss
from tiny import ATTENTION, draw_examples, tiny_gpt2, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(9, seed=5))]


def prompted(make_model: object = tiny_qwen2) -> nn.Module:
    options = AdapterOptions(rank=5, targets=ATTENTION, seed=1, core={})
    return METHODS["prompt_tuning"].add(make_model(), options).eval()  # type: ignore[operator]


def by_hand(model: nn.Module, ids: list[int]) -> Tensor:
    """Log-probabilities after each of the row's own tokens, (tokens, vocabulary), in float64."""
    base = model.get_base_model()
    prompt = model.prompt_encoder["default"].embedding.weight
    embeddings = torch.cat([prompt, base.get_input_embeddings()(torch.tensor(ids))])
    with torch.no_grad():
        return base(inputs_embeds=embeddings[None]).logits[0, len(prompt) :].double().log_softmax(-1)


@pytest.mark.parametrize("make_model", [tiny_qwen2, tiny_gpt2])
def test_the_held_out_loss_is_that_of_rows_after_the_prompt(make_model: object) -> None:
    model = prompted(make_model)
    assert num_virtual_tokens(model) == 5
    total, count = 0.0, 0
    for row in ROWS:
        logprobs = by_hand(model, row.input_ids)
        for position in range(max(1, row.num_context), len(row.input_ids)):
            total -= float(logprobs[position - 1, row.input_ids[position]])
            count += 1
    assert held_out_loss(model, ROWS, pad_id=0) == pytest.approx(total / count, abs=1e-5)
    assert held_out_loss(take_off(model), ROWS, pad_id=0) != pytest.approx(total / count, abs=1e-3)  # type: ignore[arg-type]


def test_choices_are_compared_after_the_prompt() -> None:
    model = prompted()
    row = ChoiceTokens("row", [3, 4, 5], [[6, 7], [8], [9, 10, 11]])
    expected = []
    for choice in row.choice_ids:
        logprobs = by_hand(model, row.context_ids + choice)[len(row.context_ids) - 1 :]
        expected.append(sum(float(logprobs[i, token]) for i, token in enumerate(choice)))
    assert choice_logprobs(model, [row], pad_id=0)[0] == pytest.approx(expected, abs=1e-4)


def test_an_answer_is_generated_after_the_prompt(byte_tokenizer: Callable[..., Any], byte_model: nn.Module) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    contexts = [encoder.tokenizer(prompt)["input_ids"] for prompt in ("a", "a longer prompt")]
    bare = generate_greedily(byte_model, contexts, encoder=encoder, max_new_tokens=6)
    model = prompted(lambda: byte_model)
    model.prompt_encoder["default"].embedding.weight.data.mul_(5)
    found = generate_greedily(model, contexts, encoder=encoder, max_new_tokens=6)
    for context, generation in zip(contexts, found, strict=True):
        ids = list(context)
        for _ in range(6):
            ids.append(int(by_hand(model, ids)[-1].argmax()))
        assert generation.text == encoder.tokenizer.decode(ids[len(context) :], skip_special_tokens=True)
    assert found != bare
    assert generate_greedily(take_off(model), contexts, encoder=encoder, max_new_tokens=6) == bare  # type: ignore[arg-type]
