"""Choice log-likelihoods against one full sequence at a time, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from families import make
from frozencore.errors import ModelError
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import ChoiceTokens, Row
from frozencore.tune.scoring.choice import (
    can_share_prefix,
    choice_logprobs,
    full_sequence_logprobs,
    predict_choices,
    prefix_mask_logprobs,
)
from frozencore.tune.scoring.forward import scoring_mode
from tiny import VOCABULARY, tiny_all_logits, tiny_gpt2, tiny_llama, tiny_qwen2


def reference_logprobs(model: nn.Module, rows: list[ChoiceTokens]) -> list[list[float]]:
    """Every choice as its own sequence, token by token, in float64."""
    model = copy.deepcopy(model).double().eval()
    logprobs = []
    for row in rows:
        logprobs.append([])
        for choice in row.choice_ids:
            with torch.no_grad():
                logits = model(torch.tensor([row.context_ids + choice])).logits[0].log_softmax(-1)
            start = len(row.context_ids) - 1
            logprobs[-1].append(sum(float(logits[start + i, token]) for i, token in enumerate(choice)))
    return logprobs


def random_rows(num_rows: int, *, longest_context: int = 12, longest_choice: int = 5) -> list[ChoiceTokens]:
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    def length(longest: int) -> int:
        return int(torch.randint(1, longest + 1, (), generator=generator))

    return [
        ChoiceTokens(f"row-{i}", ids(length(longest_context)), [ids(length(longest_choice)) for _ in range(1 + i % 4)])
        for i in range(num_rows)
    ]


def sliding_window_model() -> nn.Module:
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2, sliding_window=3,
    )  # fmt: skip
    return MistralForCausalLM(config)


def assert_close(actual: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(row) for row in actual] == [len(row) for row in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    "make_model", [tiny_qwen2, tiny_llama, tiny_gpt2, sliding_window_model, lambda: make("falcon")]
)
def test_every_way_gives_what_one_sequence_at_a_time_gives(make_model: Callable[[], nn.Module]) -> None:
    model, rows = make_model().eval(), random_rows(9)
    expected = reference_logprobs(model, rows)
    assert_close(choice_logprobs(model, rows, pad_id=0), expected)
    with torch.no_grad():
        assert_close(full_sequence_logprobs(model, rows, pad_id=0), expected)
        if make_model is not sliding_window_model:
            assert_close(prefix_mask_logprobs(model, rows, pad_id=0), expected)
    model.set_attn_implementation("eager")
    assert_close(choice_logprobs(model, rows, pad_id=0), expected)


def test_logprobs_of_an_adapted_model_are_the_adapters() -> None:
    model = get_peft_model(tiny_qwen2(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    rows = random_rows(6)
    actual = choice_logprobs(model, rows, pad_id=0)
    assert_close(actual, reference_logprobs(model, rows))
    with model.disable_adapter():
        assert actual != choice_logprobs(model, rows, pad_id=0)


def test_the_prefix_is_shared_only_where_the_mask_decides_what_is_seen() -> None:
    for attention, shared in (("sdpa", True), ("eager", True), ("flash_attention_2", False)):
        model = tiny_qwen2()
        model.config._attn_implementation = attention
        assert can_share_prefix(model) is shared
    assert can_share_prefix(tiny_gpt2())
    assert not can_share_prefix(sliding_window_model())
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert not can_share_prefix(get_peft_model(tiny_qwen2(), config))


def test_rows_of_the_same_beginning_share_it_and_score_as_alone() -> None:
    model = tiny_qwen2()
    first = ChoiceTokens("first", [5, 6, 7, 8], [[9, 10, 11], [9, 10, 12], [9], [13, 10, 11], [9, 10, 11]])
    rows = [
        first,
        ChoiceTokens("second", [5, 6, 7, 14], [[9, 3], [4, 5]]),
        ChoiceTokens("third", [5, 6], [[7, 8], [3]]),
    ]
    assert_close(choice_logprobs(model, rows, pad_id=0), reference_logprobs(model, rows))
    (alike,) = choice_logprobs(model, [first], pad_id=0)
    assert alike[0] == pytest.approx(alike[4], rel=1e-6)


class MaskIgnored(nn.Module):
    """A model that sees whatever came before, however it is masked."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config, self.dtype = model, model.config, model.dtype

    def forward(self, input_ids, attention_mask=None, position_ids=None, logits_to_keep=0, use_cache=None):  # type: ignore[no-untyped-def]
        return self.model(input_ids, logits_to_keep=logits_to_keep)


@pytest.mark.parametrize(
    ("make_model", "same_weights"),
    [
        (lambda: MaskIgnored(tiny_llama()), tiny_llama),
        (tiny_all_logits, tiny_qwen2),  # it cannot leave logits out
    ],
    ids=["ignores the mask", "all logits"],
)
def test_a_model_that_cannot_share_a_prefix_is_found_out_and_scored_in_full(
    make_model: Callable[[], nn.Module], same_weights: Callable[[], nn.Module]
) -> None:
    model, rows = make_model(), random_rows(4)
    assert not can_share_prefix(model)
    assert_close(choice_logprobs(model, rows, pad_id=0), reference_logprobs(same_weights(), rows))


def test_a_prompt_is_computed_once_for_all_its_choices() -> None:
    model, rows = tiny_qwen2(), random_rows(5)
    fed = []
    model.register_forward_pre_hook(lambda _, __, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True)
    for row in rows:
        prefix_mask_logprobs(model, [row], pad_id=0)
    assert sum(fed) == sum(len(row.context_ids) + sum(len(c) - 1 for c in row.choice_ids) for row in rows)


@pytest.mark.parametrize("make_model", [tiny_qwen2, sliding_window_model])
def test_half_precision_scores_as_one_sequence_at_a_time_in_half_precision(make_model: Callable[[], nn.Module]) -> None:
    model, rows = make_model().to(torch.bfloat16), random_rows(9)
    expected = [
        [
            full_sequence_logprobs(model, [ChoiceTokens("one", row.context_ids, [c])], pad_id=0)[0][0]
            for c in row.choice_ids
        ]
        for row in rows
    ]
    for ours, theirs in zip(choice_logprobs(model, rows, pad_id=0), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=0.02, abs=0.1)


def test_out_of_memory_halves_the_batch_and_gives_the_same_scores() -> None:
    model, rows = tiny_qwen2(), random_rows(12)
    expected = choice_logprobs(model, rows, pad_id=0)
    most, fed = 90, []

    def refuse(_: nn.Module, __: object, kwargs: dict[str, Any]) -> None:
        fed.append(kwargs["input_ids"].numel())
        if fed[-1] > most:
            raise torch.OutOfMemoryError("injected")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    notes: list[tuple[str, int, int, str]] = []
    actual = choice_logprobs(model, rows, pad_id=0, progress=lambda *step: notes.append(step))
    assert max(fed) > most
    assert_close(actual, expected)
    assert notes[-1][:3] == ("score", 12, 12)
    assert notes[-1][3].startswith("out of memory: 1/")


def test_scoring_leaves_the_model_as_it_was_also_after_an_error() -> None:
    model = tiny_qwen2().train()
    model.lm_head.eval()
    choice_logprobs(model, random_rows(3), pad_id=0)
    model.lm_head.weight.data[0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        choice_logprobs(model, random_rows(3), pad_id=0)
    assert model.training
    assert model.model.training
    assert not model.lm_head.training
    assert not torch.is_inference_mode_enabled()


def test_the_likeliest_choice_wins_and_lengths_normalise_by_characters(
    encoder: PromptEncoder, byte_model: nn.Module
) -> None:
    example = Row("row-1", "Is it so?", " no", (" yes, very much so", " no"))
    (encoded,) = encoder.encode([example])
    rows = [encoded.choices]
    (plain,) = predict_choices(byte_model, rows, pad_id=encoder.pad_id)
    (normalised,) = predict_choices(byte_model, rows, pad_id=encoder.pad_id, length_normalised=True)
    (expected,) = reference_logprobs(byte_model, rows)
    assert plain.logprobs == pytest.approx(expected, abs=1e-4)
    assert plain.prediction == example.choices[expected.index(max(expected))]
    assert normalised.logprobs == pytest.approx([expected[0] / 17, expected[1] / 2], abs=1e-4)


def test_the_output_layer_of_a_frozen_model_gets_contiguous_inputs_which_torch_multiplies_as_one() -> None:
    model, seen = tiny_qwen2().requires_grad_(False), list[bool]()
    head = model.get_output_embeddings()
    expected = choice_logprobs(model, random_rows(6), pad_id=0)
    with scoring_mode(model):
        handle = head.register_forward_pre_hook(lambda _, given: seen.append(given[0].is_contiguous()))
        model(torch.ones(3, 7, dtype=torch.long), logits_to_keep=2)
        handle.remove()
    assert seen == [True]
    assert not head._forward_pre_hooks
    for found, exact in zip(expected, reference_logprobs(model, random_rows(6)), strict=True):
        assert found == pytest.approx(exact, abs=1e-4)
