"""Loss on all of the assistant's turns, against the mask of a template that marks them and against each prompt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from frozencore.errors import DataError
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import PaddingCollator, labels_of
from frozencore.tune.scoring.exact_match import complete
from frozencore.tune.scoring.score import held_out_loss
from frozencore.tune.training.batching import lay_end_to_end

PLAIN = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '(left out)' }}")
TURNS = [
    {"role": "user", "content": "Capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "And of Italy?"},
    {"role": "assistant", "content": "Rome, of course"},
]


@pytest.fixture
def encoder_of(byte_tokenizer: Callable[..., Any]) -> Callable[..., PromptEncoder]:
    def make(template: str, loss_on: Any = "all", **options: Any) -> PromptEncoder:
        tokenizer = byte_tokenizer(chat=True, merges=(("b", "c"), ("e", "?")))
        tokenizer.chat_template = template
        return PromptEncoder(tokenizer, loss_on=loss_on, **options)

    return make


def row_of(encoder: PromptEncoder, turns: list[dict[str, str]] = TURNS) -> TokenRow:
    (row,) = encoder.training_rows([encoder.render_messages(turns, "row-1")])
    return row


def with_loss(encoder: PromptEncoder, row: TokenRow) -> list[str]:
    return [encoder.tokenizer.decode(row.input_ids[start:stop]) for start, stop in row.loss_spans]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_each_of_the_assistants_turns_has_the_loss_with_its_end_and_nothing_else(
    template: str, encoder_of: Callable[..., PromptEncoder]
) -> None:
    encoder = encoder_of(template)
    row = row_of(encoder)
    assert with_loss(encoder, row) == ["Paris</s>", "Rome, of course</s>"]
    kept = [token for token in labels_of(row) if token != -100]
    assert encoder.tokenizer.decode(kept) == "Paris</s>Rome, of course</s>"


def test_the_labels_are_the_mask_of_transformers_itself(encoder_of: Callable[..., PromptEncoder]) -> None:
    encoder = encoder_of(MARKED)
    theirs = encoder.tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    row, labels = row_of(encoder), labels_of(row_of(encoder))
    length = len(row.input_ids)
    assert row.input_ids == theirs["input_ids"][:length]
    assert [int(label != -100) for label in labels] == theirs["assistant_masks"][:length]
    assert not any(theirs["assistant_masks"][length:])


def test_every_turn_stands_after_the_tokens_that_it_would_be_generated_from(
    encoder_of: Callable[..., PromptEncoder],
) -> None:
    encoder, last = encoder_of(PLAIN), encoder_of(PLAIN, "last")
    row = row_of(encoder)
    for number, (start, stop) in zip((2, 4), row.loss_spans, strict=True):
        alone = row_of(last, TURNS[:number])
        assert row.input_ids[:start] == alone.input_ids[: alone.num_context]
        assert row.input_ids[start:stop] == alone.input_ids[alone.num_context :]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_conversation_of_one_answer_is_the_same_row_either_way(
    template: str, encoder_of: Callable[..., PromptEncoder]
) -> None:
    assert row_of(encoder_of(template), TURNS[:2]) == row_of(encoder_of(template, "last"), TURNS[:2])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (FORGETFUL, "Row row-1: the chat template writes turn 2, the assistant's, otherwise .* Use --loss-on last"),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}" + PLAIN, "marks none of the assistant's turns"),
    ],
)
def test_a_template_that_hides_the_turns_is_refused_in_one_line(
    template: str, reason: str, encoder_of: Callable[..., PromptEncoder]
) -> None:
    with pytest.raises(DataError, match=reason) as error:
        row_of(encoder_of(template))
    assert "\n" not in str(error.value)


def test_a_cut_prompt_leaves_the_loss_on_the_same_words(encoder_of: Callable[..., PromptEncoder]) -> None:
    encoder = encoder_of(PLAIN, max_length=60, too_long="truncate")
    row = row_of(encoder)
    assert len(row.input_ids) == 60
    assert with_loss(encoder, row) == ["Paris</s>", "Rome, of course</s>"]


def test_loss_and_batches_count_the_turns_alone(
    encoder_of: Callable[..., PromptEncoder], byte_model: nn.Module
) -> None:
    encoder = encoder_of(PLAIN)
    row = row_of(encoder)
    ids, labels = torch.tensor([row.input_ids]), torch.tensor([labels_of(row)])
    with torch.no_grad():
        expected = cross_entropy(byte_model.eval()(ids).logits[0, :-1], labels[0, 1:])
    assert held_out_loss(byte_model, [row], pad_id=encoder.pad_id) == pytest.approx(float(expected), abs=1e-5)
    batch = PaddingCollator(encoder.pad_id)([row, TokenRow("short", [1, 2], 1)])
    assert batch["labels"][0].tolist() == labels[0].tolist()
    assert int((batch["labels"][:, 1:] != -100).sum()) == row.num_targets + 1
    assert lay_end_to_end([row])["labels"].tolist() == labels.tolist()


def test_the_last_turn_is_what_is_generated_and_compared(
    encoder_of: Callable[..., PromptEncoder], byte_model: nn.Module
) -> None:
    encoder = encoder_of(PLAIN)
    ((found,), _) = complete(byte_model, encoder, [row_of(encoder)], max_new_tokens=3)
    assert found.gold == "Rome, of course"


def test_many_turns_keep_their_order(encoder_of: Callable[..., PromptEncoder]) -> None:
    turns = list(chain.from_iterable([TURNS[:2]] * 5))
    row = row_of(encoder_of(PLAIN), turns)
    assert len(row.loss_spans) == 5
    assert row.input_ids == row_of(encoder_of(PLAIN, "last"), turns).input_ids
