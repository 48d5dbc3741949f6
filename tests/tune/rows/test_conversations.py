"""The assistant's turns in a conversation's text, against transformers' mask for the same template with marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from torch import nn
from torch.nn.functional import cross_entropy

from fixtures import CHAT_TEMPLATE
from frozencore.errors import DataError
from frozencore.tune.rows.chat_template import added_tokens
from frozencore.tune.rows.conversations import SYSTEM_FOLDED
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import NOT_WRITTEN, Row, TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, labels_of
from frozencore.tune.scoring.exact_match import complete
from frozencore.tune.scoring.score import held_out_loss

# Small chat templates in the manners of real ones. What the assistant writes stands between « and ».
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|head|>", "<|body|>", "<|eot|>", "<start_of_turn>", "<end_of_turn>", "<|user|>",
    "<|assistant|>", "<|end|>", "<|start|>", "<|message|>", "<|return|>", "<|call|>", "[INST]", "[/INST]", "<think>",
    "</think>", "<tool>",
)  # fmt: skip
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool>{{ (c.function or c).name }}{{ (c.function or c).arguments|tojson }}"
    "{% endfor %}"
)
_CALLS_AS_TEXT = "{% for c in m.tool_calls or [] %}{{ '<tool>' + c.function.name + c.function.arguments }}{% endfor %}"
_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
_ASKS = "{% if add_generation_prompt %}"
_ANSWERS = "{% for m in messages %}{% if m.role == 'assistant' %}"
_SPLIT = (
    "{% set said = m.content or '' %}{% set thought = m.reasoning_content or '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = said.split('</think>')[-1].strip() %}{% endif %}"
)
_LAST_ASKED = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}"
)


def _turns(answer: str, other: str, asks: str, first: str = "") -> str:
    return f"{first}{_ANSWERS}{answer}{{% else %}}{other}{{% endif %}}{{% endfor %}}{_ASKS}{asks}{{% endif %}}"


_IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_IM_ASKS = "<|im_start|>assistant\n"
TEMPLATES = {
    "plain": _turns("<|im_start|>assistant\n«{{ m.content }}" + _CALLS + "<|im_end|>»\n", _IM, _IM_ASKS, _TOOLS),
    "newline in the mark": _turns(
        "<|im_start|>assistant\n«{{ m.content }}" + _CALLS + "<|im_end|>\n»", _IM, _IM_ASKS, _TOOLS
    ),
    "headers": _turns(
        "<|head|>assistant<|body|>\n\n«{{ m.content|trim }}" + _CALLS + "<|eot|>»",
        "<|head|>{{ m.role }}<|body|>\n\n{{ m.content|trim }}<|eot|>",
        "<|head|>assistant<|body|>\n\n",
        "{{ bos_token }}" + _TOOLS,
    ),
    "another end": _turns(
        "<start_of_turn>model\n«{{ m.content }}" + _CALLS + "<end_of_turn>»\n",
        "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "{{ bos_token }}" + _TOOLS,
    ),
    "an end after the last": _turns(
        "<|assistant|>\n«{{ m.content }}" + _CALLS + "<|end|>»",
        "<|user|>\n{{ m.content }}<|end|>", "<|assistant|>\n", _TOOLS,
    ) + "{% if not add_generation_prompt %}«{{ eos_token }}»{% endif %}",
    "an end of its own for the last": _turns(
        "<|assistant|>\n«{{ m.content }}" + _CALLS + "{{ eos_token if loop.last else '<|end|>' }}»\n",
        "<|user|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n", _TOOLS,
    ),
    "no end": _turns(
        "<|assistant|>«\n{{ m.content }}" + _CALLS + "»", "<|user|>\n{{ m.content }}", "<|assistant|>", _TOOLS
    ),
    "a space before the answer, tools before the last question": (
        "{{ bos_token }}" + _LAST_ASKED + _ANSWERS + "« {{ m.content }}" + _CALLS + "{{ eos_token }}»{% else %}"
        "{% if loop.index0 == ns.asked %}" + _TOOLS + "{% endif %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "opens a thought": _turns(
        "<|assistant|>«{{ m.content.split('</think>')[-1] }}" + _CALLS_AS_TEXT + "{{ eos_token }}»",
        "<|user|>{{ m.content }}", "<|assistant|><think>\n", "{{ bos_token }}" + _TOOLS,
    ),
    "writes the thought that it opens": _turns(
        _SPLIT + "<|im_start|>assistant\n{% if loop.index0 > ns.asked %}<think>\n«{{ thought }}\n</think>\n\n{{ said }}"
        + _CALLS + "<|im_end|>»\n{% else %}«{{ said }}" + _CALLS + "<|im_end|>»\n{% endif %}",
        _IM, "<|im_start|>assistant\n<think>\n", _LAST_ASKED + _TOOLS,
    ),
    "an empty thought for the last": _turns(
        _SPLIT + _IM_ASKS + "«{% if loop.last or thought and loop.index0 > ns.asked %}<think>\n{{ thought }}"
        "\n</think>\n\n{% endif %}{{ said }}" + _CALLS + "<|im_end|>»\n",
        _IM, _IM_ASKS, _LAST_ASKED + _TOOLS,
    ),
    "a thought on one line": _turns(
        _SPLIT + "<|im_start|>assistant\n«<think>{{ thought }}</think>{{ said }}" + _CALLS + "<|im_end|>»\n",
        _IM, "<|im_start|>assistant\n<think>\n", _TOOLS,
    ),
    "asks without a thought": _turns(
        _SPLIT + "<|im_start|>assistant\n{% if loop.last and not thought %}<think>\n\n</think>\n\n{% endif %}"
        "«{% if loop.last and thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
        + _CALLS + "<|im_end|>»\n", _IM, "<|im_start|>assistant\n<think>\n\n</think>\n\n", _TOOLS,
    ),
    "channels": _turns(
        "<|start|>assistant«{% if m.reasoning_content and loop.last %}<|message|>{{ m.reasoning_content }}<|end|>"
        "<|start|>assistant{% endif %}<|message|>{{ m.content }}" + _CALLS
        + "{{ '<|return|>' if loop.last else '<|end|>' }}»",
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>", "<|start|>assistant", _TOOLS,
    ),
    "no words for a prompt": _turns(
        "«assistant: {{ m.content }}" + _CALLS + "{{ eos_token }}»\n", "{{ m.role }}: {{ m.content }}\n", "", _TOOLS
    ),
}  # fmt: skip


def plain(template: str) -> str:
    """The template without marks."""
    return template.replace("«", "").replace("»", "")


def marked(template: str) -> str:
    """The template with transformers' marks of what the assistant writes."""
    lines = template.replace("«\n", "«{{ '\n' }}").replace("»\n", "»{{ '\n' }}")  # Jinja drops a line's end after a tag
    return lines.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")


PLAIN = CHAT_TEMPLATE
MARKED = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TURNS = [
    {"role": "user", "content": "Capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "And of Italy?"},
    {"role": "assistant", "content": "Rome, of course"},
]


CALL = {"type": "function", "function": {"name": "capital", "arguments": {"of": "France"}}}
TOOLS = [{"type": "function", "function": {"name": "capital", "parameters": {}}}]
ASKED, SAID = TURNS[0], {"role": "assistant", "content": "Paris"}
THOUGHT, BESIDE = {**SAID, "content": "<think>a</think>Paris"}, {**SAID, "reasoning_content": "b"}
FOUND = {"role": "tool", "content": "Paris"}
FORMS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "a question": ([ASKED, SAID], None),
    "two questions": ([{"role": "system", "content": "Be brief."}, *TURNS], None),
    "a call first": ([ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, FOUND, SAID], TOOLS),
    "a call last": ([ASKED, {"role": "assistant", "content": "Looking.", "tool_calls": [CALL]}], TOOLS),
    "a call alone": ([*TURNS, TURNS[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}], TOOLS),
    "thoughts in the content": ([ASKED, THOUGHT, ASKED, THOUGHT], None),
    "thoughts beside it": ([ASKED, BESIDE, ASKED, BESIDE], None),
    "two answers": ([ASKED, SAID, SAID], None),
    "space at both ends": ([ASKED, {"role": "assistant", "content": "    return x\n"}, ASKED, SAID], None),
}  # fmt: skip


NOT_PLACED = {
    (name, "two answers")
    for name in (
        "an end of its own for the last", "an empty thought for the last", "asks without a thought", "channels",
    )
}  # fmt: skip
"""Conversations of which a template writes the last turn otherwise than after its prompt."""
MAY_BE_REFUSED = (
    "writes the thought that it opens", "a space before the answer, tools before the last question",
    "an empty thought for the last",
)  # fmt: skip


def talk_row(turns: Sequence[Mapping[str, Any]], tools: Any = None, num_completion: int = 1) -> Row:
    return Row("row-1", messages=tuple(turns), tools=tools, num_completion=num_completion)


def talk_encoder(byte_tokenizer: Callable[..., Any], template: str, loss_on: Any, **options: Any) -> PromptEncoder:
    tokenizer = byte_tokenizer(special=SPECIAL, **options)
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer, loss_on=loss_on, max_length=100_000)


def require_the_templates_own(
    byte_tokenizer: Callable[..., Any], template: str, with_marks: bool, turns: list[dict[str, Any]], tools: Any
) -> None:
    """Compare a conversation's rows with the text and the mask of ``apply_chat_template``."""
    last = talk_encoder(byte_tokenizer, marked(template) if with_marks else plain(template), "last")
    text = last.render(talk_row(turns, tools))
    (row,) = last.encode([text])
    ids = row.input_ids if text.suffix is not None else row.input_ids[:-1]
    as_given = [{**turn, "content": turn["content"] or ""} for turn in turns]
    if "arguments }}" in template:  # it takes them as text
        called = {"type": "function", "function": {"name": "capital", "arguments": '{"of": "France"}'}}
        as_given = [{**turn, "tool_calls": [called]} if turn.get("tool_calls") else turn for turn in as_given]
    theirs = talk_encoder(byte_tokenizer, marked(template), "all").tokenizer.apply_chat_template(
        as_given, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == theirs["input_ids"][: len(ids)]
    wanted = theirs["assistant_masks"]
    assert not any(wanted[len(ids) :])
    if template == TEMPLATES["no end"]:  # the next turn's mark is where generation stops
        marks, before = set(last.tokenizer.added_tokens_decoder), [0, *wanted]
        wanted = [int(own or (before[i] and ids[i] in marks)) for i, own in enumerate(wanted[: len(ids)])]
    if text.suffix is None:
        assert row.input_ids[-1] == last.eos_id
    assert row.loss_spans[-1][1] == len(row.input_ids)
    begins = max(i for i in range(len(ids)) if wanted[i] and not (i and wanted[i - 1]))
    assert begins == row.answer_start or turns[-2]["role"] == "assistant"  # two turns may touch
    assert all(wanted[row.answer_start : len(ids)])
    if with_marks:
        every = talk_encoder(byte_tokenizer, marked(template), "all")
        (of_all,) = every.encode([every.render(talk_row(turns, tools))])
        assert of_all.input_ids == row.input_ids
        assert [int(label != -100) for label in labels_of(of_all)][: len(ids)] == wanted[: len(ids)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "with_marks"),
    [(name, marks) for name in TEMPLATES for marks in (True, False) if marks or "mark" not in name],
)
def test_a_conversation_is_the_templates_own_text_and_its_loss_is_on_the_templates_answers(
    name: str, form: str, with_marks: bool, byte_tokenizer: Callable[..., Any]
) -> None:
    if with_marks or (name, form) not in NOT_PLACED:
        require_the_templates_own(byte_tokenizer, TEMPLATES[name], with_marks, *FORMS[form])
    else:
        turns, tools = FORMS[form]
        with pytest.raises(DataError, match="otherwise than after its prompt, .* Use rows of prompt and completion"):
            talk_encoder(byte_tokenizer, plain(TEMPLATES[name]), "last").render(talk_row(turns, tools))


WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)  # the special tokens are longer than chance


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], Any]:
    turns: list[dict[str, Any]] = [{"role": "system", "content": draw(WORDS)}] * draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        turns.append({"role": "user", "content": draw(WORDS) * draw(st.sampled_from((1, 1, 99)))})
        if draw(st.booleans()):
            called = {"name": "capital", "arguments": {draw(WORDS): draw(WORDS)}}
            turns.append({"role": "assistant", "content": draw(WORDS), "tool_calls": [{"function": called}]})
            turns.append({"role": "tool", "content": draw(WORDS)})
        turns.append(
            {"role": "assistant", "content": draw(WORDS) + "."}
        )  # transformers' mask loses a last character's bytes
    return turns, draw(st.sampled_from((None, TOOLS)))


NOT_AS_TEXT = [name for name, template in TEMPLATES.items() if "arguments }}" not in template]


@pytest.mark.parametrize("name", NOT_AS_TEXT)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(drawn=conversations(), with_marks=st.booleans())
def test_any_conversation_is_the_templates_own_text(
    drawn: tuple[list[dict[str, Any]], Any], with_marks: bool, name: str, byte_tokenizer: Callable[..., Any]
) -> None:
    turns, tools = drawn
    try:
        require_the_templates_own(byte_tokenizer, TEMPLATES[name], with_marks or "mark" in name, turns, tools)
    except DataError:
        assert not with_marks
        assert name in MAY_BE_REFUSED


@pytest.fixture
def encoder_of(byte_tokenizer: Callable[..., Any]) -> Callable[..., PromptEncoder]:
    def make(template: str, loss_on: Any = "all", **options: Any) -> PromptEncoder:
        tokenizer = byte_tokenizer(chat=True, merges=(("b", "c"), ("e", "?")))
        tokenizer.chat_template = template
        return PromptEncoder(tokenizer, loss_on=loss_on, **options)

    return make


def row_of(encoder: PromptEncoder, turns: list[dict[str, str]] = TURNS) -> TokenRow:
    (row,) = encoder.encode([encoder.render(talk_row(turns))])
    return row


def with_loss(encoder: PromptEncoder, row: TokenRow) -> list[str]:
    return [encoder.tokenizer.decode(row.input_ids[start:stop]) for start, stop in row.loss_spans]


def test_each_of_the_assistants_turns_has_the_loss_with_its_end_and_nothing_else(
    encoder_of: Callable[..., PromptEncoder],
) -> None:
    template = MARKED
    encoder = encoder_of(template)
    row = row_of(encoder)
    assert with_loss(encoder, row) == ["Paris</s>", "Rome, of course</s>"]
    kept = [token for token in labels_of(row) if token != -100]
    assert encoder.tokenizer.decode(kept) == "Paris</s>Rome, of course</s>"
    cut = row_of(encoder_of(template, max_length=60, too_long="cut"))
    assert (len(cut.input_ids), with_loss(encoder, cut)) == (60, with_loss(encoder, row))
    last = encoder_of(template, "last")
    assert row_of(encoder, TURNS[:2]) == row_of(last, TURNS[:2])
    many = list(chain.from_iterable([TURNS[:2]] * 5))
    assert len(row_of(encoder, many).loss_spans) == 5
    assert row_of(encoder, many).input_ids == row_of(last, many).input_ids


def test_every_turn_stands_after_the_tokens_that_it_would_be_generated_from(
    encoder_of: Callable[..., PromptEncoder],
) -> None:
    encoder, last = encoder_of(MARKED), encoder_of(MARKED, "last")
    row = row_of(encoder)
    for number, (start, stop) in zip((2, 4), row.loss_spans, strict=True):
        alone = row_of(last, TURNS[:number])
        assert row.input_ids[:start] == alone.input_ids[: alone.num_context]
        assert row.input_ids[start:stop] == alone.input_ids[alone.num_context :]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PLAIN, "Row row-1: loss on turns before the last one needs a chat template that marks .* Use --loss-on last"),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}" + PLAIN, "not write the content of turn 2"),
    ],
)
def test_a_template_that_hides_the_turns_is_refused_in_one_line(
    template: str, reason: str, encoder_of: Callable[..., PromptEncoder]
) -> None:
    with pytest.raises(DataError, match=reason) as error:
        row_of(encoder_of(template))
    assert "\n" not in str(error.value)


def test_a_call_whose_function_is_no_object_is_refused_in_one_line(encoder_of: Callable[..., PromptEncoder]) -> None:
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": "capital", "arguments": {"of": "France"}}],
    }
    with pytest.raises(DataError, match="Row row-1: 'function' of a tool call must hold an object .* holds 'capital'"):
        row_of(encoder_of(PLAIN), [ASKED, called])


def test_loss_and_batches_count_the_turns_alone(
    encoder_of: Callable[..., PromptEncoder], byte_model: nn.Module
) -> None:
    encoder = encoder_of(MARKED)
    row = row_of(encoder)
    ids, labels = torch.tensor([row.input_ids]), torch.tensor([labels_of(row)])
    with torch.no_grad():
        expected = cross_entropy(byte_model.eval()(ids).logits[0, :-1], labels[0, 1:])
    assert held_out_loss(byte_model, [row], pad_id=encoder.pad_id) == pytest.approx(float(expected), abs=1e-5)
    batch = PaddingCollator(encoder.pad_id)([row, TokenRow("short", [1, 2], 1)])
    assert batch["labels"][0].tolist() == labels[0].tolist()
    assert int((batch["labels"][:, 1:] != -100).sum()) == row.num_targets + 1
    ((found,), _) = complete(byte_model, encoder, [row], max_new_tokens=3)
    assert found.gold == "Rome, of course"  # the last turn is what is generated and compared


@pytest.mark.parametrize(
    "flag",
    [
        {"weight": 0}, {"train": False}, {"weight": 0.0, "train": None}, {"loss": False}, {"loss": "false"},
        {"loss_mask": 0}, {"trainable": "no"}, {"train": "0"},
    ],
)  # fmt: skip
def test_a_message_without_weight_has_no_loss(flag: dict[str, Any], encoder_of: Callable[..., PromptEncoder]) -> None:
    encoder, plain_encoder = encoder_of(MARKED), encoder_of(PLAIN)
    first, last = (
        [{**turn, **flag} if i == at else {**turn, "weight": 1} for i, turn in enumerate(TURNS)] for at in (1, 3)
    )
    assert with_loss(encoder, row_of(encoder, first)) == ["Rome, of course</s>"]
    assert with_loss(encoder, row_of(encoder, last)) == ["Paris</s>"]
    assert with_loss(plain_encoder, row_of(plain_encoder, first)) == ["Rome, of course</s>"]
    assert row_of(encoder, first) == row_of(encoder_of(MARKED, "last"), first)


def test_an_empty_turn_is_refused_where_it_has_loss(encoder_of: Callable[..., PromptEncoder]) -> None:
    empty = {"role": "assistant", "content": ""}
    encoder, last = encoder_of(MARKED), encoder_of(MARKED, "last")
    with pytest.raises(
        DataError, match="Row row-1: a turn with loss must hold text or a call, but turn 2, .* weight 0"
    ):
        row_of(encoder, [ASKED, empty, *TURNS[2:]])
    weightless = row_of(encoder, [ASKED, {**empty, "weight": 0}, *TURNS[2:]])
    assert weightless == row_of(last, [ASKED, empty, *TURNS[2:]])
    assert with_loss(encoder, weightless) == ["Rome, of course</s>"]


def test_labels_that_are_special_tokens_are_compared(byte_tokenizer: Callable[..., Any], byte_model: nn.Module) -> None:
    encoder = talk_encoder(byte_tokenizer, PLAIN, "last")
    encoder.tokenizer.add_special_tokens({"additional_special_tokens": ["<pos>", "<neg>"]})
    rows = encoder.encode([encoder.render(talk_row([ASKED, {**SAID, "content": "<pos>"}]))])
    ((found,), _) = complete(byte_model, encoder, rows, max_new_tokens=3)
    assert (found.gold, found.correct) == ("<pos>", False)
    wrong = encoder.tokenizer.convert_tokens_to_ids("<neg>")
    head = byte_model.lm_head
    with torch.no_grad():
        head.weight.zero_()  # all logits are equal but for the bias
    head.bias = nn.Parameter(torch.zeros(head.out_features).index_fill(0, torch.tensor([wrong]), 9.0))
    ((found,), _) = complete(byte_model, encoder, rows, max_new_tokens=1)
    assert (found.text, found.correct) == ("<neg>", False)


def test_generation_ends_at_the_templates_own_end(byte_tokenizer: Callable[..., Any]) -> None:
    for name, ends in (
        ("another end", {"</s>", "<end_of_turn>"}),
        ("an end after the last", {"</s>", "<|end|>"}),
        ("no end", {"</s>", "<|user|>"}),
    ):
        encoder = talk_encoder(byte_tokenizer, plain(TEMPLATES[name]), "last")
        assert {*encoder.tokenizer.convert_ids_to_tokens(encoder.end_ids)} == ends


@pytest.mark.parametrize("end", ["<|im_end|>", "<|END_OF_TURN_TOKEN|>", " #end of turn."])
@pytest.mark.parametrize("answer", ["d", "end", "E", "turn", "of", "A"])
def test_an_answer_whose_letters_the_turns_end_holds_is_the_letters(
    end: str, answer: str, byte_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer(special=(end,) if end.startswith("<") else ())
    tokenizer.chat_template = PLAIN.replace("</s>", end)
    encoder = PromptEncoder(tokenizer)
    text = encoder.render(Row("row-1", "Which?", f" {answer}", (f" {answer}", " z")))
    assert text.choices == (answer, "z")
    (row,) = encoder.encode([text])
    assert row.choices is not None
    assert list(map(tokenizer.decode, row.choices.choice_ids)) == [answer, "z"]
    ends = end if end.startswith("<") else f"{end}</s>"
    assert with_loss(encoder, row) == [answer + ends]


def test_what_the_template_does_not_write_of_a_rows_context_is_counted(byte_tokenizer: Callable[..., Any]) -> None:
    template = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")
    encoder = talk_encoder(byte_tokenizer, template, "last")
    called = {"role": "assistant", "content": "Paris", "tool_calls": [CALL]}
    answered = {"role": "tool", "content": "It is Paris."}
    for before, tools, lost in (
        ([], None, set()),
        ([{"role": "developer", "content": "Be brief."}], None, {"content of the developer"}),
        ([ASKED, called, answered], None, {"a call of the assistant", "content of the tool"}),
        ([], TOOLS, {"tools"}),
    ):
        text = encoder.render(talk_row([*before, ASKED, {**SAID, "reasoning_content": None}], tools))
        assert set(text.changed) == {f"the chat template does not write {what}" for what in lost}
    for key, value in (("reasoning_content", "Paris"), ("mask", True), ("prefix", False), ("score", 0.5)):
        text = encoder.render(talk_row([ASKED, {**SAID, key: value}]))
        assert text.changed == (f"the chat template does not write {key}",)
    tojson = talk_encoder(byte_tokenizer, PLAIN.replace("{{ m.content }}", "{{ m.content|tojson }}"), "last")
    assert tojson.render(talk_row([{**ASKED, "content": 'Say "hi"\n'}, SAID])).changed == ()


@pytest.mark.parametrize(
    ("written", "notes"),
    [
        ("{{ m.content }}", 1),
        ("{# {{ m.reasoning_content }}\n#}{{ m.content }}", 1),
        ("{% if m.tool_calls %}{{ m.reasoning_content }}{% endif %}{{ m.content }}", 1),
        ("{{ m.reasoning_content|trim }}|{{ m.content }}", 0),
        ("{{ m.thinking }}|{{ m.content }}", 0),  # transformers gives it the same thought
    ],
)
@pytest.mark.parametrize("thought", ["Of France, then.\n", "Paris"])
def test_a_thought_that_the_template_does_not_write_in_a_turn_with_loss_is_counted(
    written: str, notes: int, thought: str, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = talk_encoder(byte_tokenizer, PLAIN.replace("{{ m.content }}", written), "last")
    text = encoder.render(talk_row([ASKED, {**SAID, "reasoning_content": thought}]))
    assert text.changed == ("the chat template does not write reasoning_content",) * notes


def test_a_thought_in_the_content_under_an_empty_one_is_counted(byte_tokenizer: Callable[..., Any]) -> None:
    thought = "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    encoder = talk_encoder(byte_tokenizer, PLAIN.replace("{{ m.content }}", thought + "{{ m.content }}"), "last")
    for answer, notes in ((THOUGHT, 1), (BESIDE, 0), (SAID, 0), ({**BESIDE, **THOUGHT}, 0)):
        changed = encoder.render(talk_row([ASKED, answer])).changed
        assert [note.partition(" as such, ")[0] for note in changed if note.startswith(NOT_WRITTEN)] == [
            "the chat template does not write a thought in the content"
        ] * notes


@pytest.mark.parametrize("with_marks", [True, False])
@pytest.mark.parametrize(
    ("name", "answer", "asks"),
    [
        ("opens a thought", SAID, "<|assistant|><think>\\n"),
        ("a thought on one line", SAID, "<|im_start|>assistant\\n<think>\\n"),
        ("asks without a thought", BESIDE, "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"),
        ("asks without a thought", SAID, None),
        ("writes the thought that it opens", SAID, None),
        ("an end of its own for the last", SAID, None),
    ],
)
def test_a_row_that_goes_on_otherwise_than_the_prompt_of_a_chat_is_counted(
    name: str, answer: dict[str, Any], asks: str | None, with_marks: bool, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = talk_encoder(byte_tokenizer, (marked if with_marks else plain)(TEMPLATES[name]), "last")
    text = encoder.render(talk_row([ASKED, SAID, ASKED, answer]))
    ids, _ = encoder.ask([ASKED, SAID, ASKED], "row-1")
    assert text.whole.startswith(encoder.tokenizer.decode(ids)) == (asks is None)
    assert [note.partition(", but")[0] for note in text.changed] == [f"a chat's prompt ends with '{asks}'"] * bool(asks)


def test_a_turn_that_the_template_marks_in_pieces_has_the_same_loss_as_last_and_as_all(
    encoder_of: Callable[..., PromptEncoder], byte_model: nn.Module
) -> None:
    pieces = "{% generation %}{{ m.thought }}{% endgeneration %}|{% generation %}{{ m.content }}</s>{% endgeneration %}"
    template = MARKED.replace("{% generation %}{{ m.content }}</s>{% endgeneration %}", pieces)
    turns = [turn | {"thought": "So"} if turn["role"] == "assistant" else turn for turn in TURNS]
    every, last = encoder_of(template), encoder_of(template, "last")
    of_all, of_last = row_of(every, turns), row_of(last, turns)
    assert with_loss(every, of_all) == ["So", "Paris</s>", "So", "Rome, of course</s>"]
    assert with_loss(last, of_last) == ["So", "Rome, of course</s>"]
    assert (of_last.loss_spans, of_last.input_ids) == (of_all.loss_spans[2:], of_all.input_ids)
    assert of_last.answer_start == of_all.answer_start == of_last.num_context
    ((found,), _) = complete(byte_model, last, [of_last], max_new_tokens=1)
    assert found.gold == "So|Rome, of course"


@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_a_mark_belongs_to_the_turn_in_which_it_stands_also_where_there_are_as_many_as_turns(
    loss_on: Any, encoder_of: Callable[..., PromptEncoder]
) -> None:
    answer = "{% generation %}{{ m.content }}</s>{% endgeneration %}"
    pieces = "{% generation %}({{ m.reasoning_content }}){% endgeneration %}|" + answer
    called = "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}</s>{% else %}" + pieces + "{% endif %}"
    encoder = encoder_of(MARKED.replace(answer, called), loss_on)
    call = {"role": "assistant", "content": "", "tool_calls": [CALL], "weight": 0}
    row = row_of(encoder, [ASKED, call, FOUND, BESIDE])
    assert with_loss(encoder, row) == ["(b)", "Paris</s>"]


def test_a_call_ends_where_generation_stops(byte_tokenizer: Callable[..., Any]) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    written = (
        "{% for c in m.tool_calls %}<call>{{ c.function.name }}{{ c.function.arguments|tojson }}</call>{% endfor %}"
    )
    for end, added, ended in (
        ("", AddedToken("</call>", special=True), False),  # as GLM's, where the next turn's first token is the end
        ("{% if not m.tool_calls %}<end>{% endif %}", AddedToken("</call>", special=False), False),
        ("{{ '<stop>' if m.tool_calls else '<end>' }}", AddedToken("</call>", special=False), True),
    ):
        tokenizer = byte_tokenizer(special=("<end>", "<stop>"))
        tokenizer.add_tokens([added])
        tokenizer.chat_template = (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + written + end + "{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        encoder = PromptEncoder(tokenizer)
        (row,) = encoder.encode([encoder.render(talk_row([ASKED, called]))])
        assert with_loss(encoder, row) == ['<call>capital{"of": "France"}</call>' + ("<stop>" if ended else "</s>")]


@pytest.mark.parametrize("given", ['{"of":"France","at":1e5,"to":1.10}', {"of": "France"}])
@pytest.mark.parametrize("template", ["'' + c.function.arguments", "c.function.arguments"])
def test_a_template_that_takes_arguments_as_text_gets_the_rows_own_text(
    template: str, given: Any, byte_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls %}{{ c.function.name }}{{ TEXT }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ).replace("TEXT", template)
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "capital", "arguments": given}}]}
    text = PromptEncoder(tokenizer).render(talk_row([ASKED, called]))
    assert text.completion == "capital" + (given if isinstance(given, str) else '{"of": "France"}')


def completion_of(loss_on: Any, num_completion: int, encoder_of: Callable[..., PromptEncoder]) -> list[str]:
    encoder = encoder_of(MARKED, loss_on)
    text = encoder.render(talk_row(TURNS, num_completion=num_completion))
    return with_loss(encoder, encoder.encode([text])[0])


def test_every_assistants_turn_of_a_completion_has_loss(encoder_of: Callable[..., PromptEncoder]) -> None:
    """As with TRL's ``assistant_only_loss``; its mask of a completion alone covers the user's turns in it too."""
    assert completion_of("last", 3, encoder_of) == ["Paris</s>", "Rome, of course</s>"]
    assert completion_of("last", 1, encoder_of) == ["Rome, of course</s>"]
    assert completion_of("all", 1, encoder_of) == ["Paris</s>", "Rome, of course</s>"]


def test_the_system_text_stands_in_the_first_question_if_the_template_takes_no_system_turn(
    encoder_of: Callable[..., PromptEncoder],
) -> None:
    """As Mistral's and Gemma's templates do it, or refuse it."""
    alternates = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
    )
    system = {"role": "system", "content": "Be brief."}
    for loss_on in ("last", "all"):
        encoder = encoder_of(alternates + MARKED, loss_on)
        text = encoder.render(talk_row([system, *TURNS]))
        assert text.changed == (SYSTEM_FOLDED,)
        folded = {"role": "user", "content": "Be brief.\n\nCapital of France?"}
        plain_text = encoder.render(talk_row([folded, *TURNS[1:]]))
        assert (text.context, text.completion) == (plain_text.context, plain_text.completion)
        weightless = encoder.render(talk_row([system, TURNS[0], {**TURNS[1], "weight": 0}, *TURNS[2:]]))
        assert weightless.completion == "Rome, of course</s>"
        ids, _ = encoder.ask([system, TURNS[0]], "row-1")
        assert encoder.tokenizer.decode(ids).startswith("<s>user\nBe brief.\n\nCapital")


def test_a_control_token_inside_of_a_text_is_named_and_the_gold_is_not_cut(
    encoder_of: Callable[..., PromptEncoder], byte_model: nn.Module
) -> None:
    encoder = encoder_of(PLAIN, "last")
    text = encoder.render(talk_row([ASKED, {**SAID, "content": "one</s>two</s>"}]))
    assert [what.partition(" stood ")[0] for what in text.changed] == [
        "</s>", "the control token </s> stands inside of a text",
    ]  # fmt: skip
    assert (
        encoder.render(Row("row-1", completion="a<s>b</s>")).changed[-1]
        == "the control token <s> stands inside of a text"
    )
    ((found,), _) = complete(byte_model, encoder, encoder.encode([text]), max_new_tokens=1)
    assert found.gold == "one</s>two"


CHATS = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
OF_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that take contents as lists of parts, for images."""
MARK = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|<(?:start|end)_of_\w+>|<turn\|>|<\|turn>")


@pytest.mark.parametrize("file", CHATS, ids=lambda file: file.stem)
def test_every_template_of_trl_has_loss_on_each_turn_and_its_end(
    file: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    turns = [turn | {"content": turn["content"] + "."} for turn in TURNS]
    is_marked = "{% generation" in file.read_text() or "{%- generation" in file.read_text()
    for loss_on, answers in (("last", ["Rome, of course."]), ("all", ["Paris.", "Rome, of course."])):
        tokenizer = byte_tokenizer(special=tuple(dict.fromkeys(MARK.findall(file.read_text()))))
        tokenizer.chat_template = file.read_text()
        encoder = PromptEncoder(tokenizer, loss_on=loss_on, max_length=100_000)
        if file.stem.removesuffix("_training") in OF_PARTS or (loss_on == "all" and not is_marked):
            with pytest.raises(DataError, match=r"^Row row-1: [^\n]*$"):
                row_of(encoder, turns)
            continue
        spans, special = with_loss(encoder, row_of(encoder, turns)), tuple(added_tokens(tokenizer))
        assert [answer in span for answer, span in zip(answers, spans, strict=True)] == [True] * len(answers)
        assert all(span.rstrip().endswith(special) for span in spans)
        assert not any("Italy" in span for span in spans)
