"""Text and tokens of rows, against what the tokenizer says of the text itself; dates in chat templates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date, datetime
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.utils.chat_template_utils as chat_template_utils
from huggingface_hub.errors import StrictDataclassError
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import CONFIG_MAPPING, AutoTokenizer, BloomConfig, Gemma3Config, GPT2Config, MptConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from frozencore.errors import ConfigError, DataError, ModelError, NoRowsError
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows.prompts import PROMPT_DATE, PromptEncoder, context_limit, unknown_share, with_fixed_date
from frozencore.tune.rows.row import Row, TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, group_rows, make_batches
from frozencore.tune.scoring.score import held_out_loss
from frozencore_lab.tasks.registry import find_task
from tiny import tiny_qwen2

EXAMPLE = Row("row-1", "Is it?", " yes", (" yes", " no"))


@pytest.mark.parametrize("adds_start", [False, True])
def test_plain_rows_are_prompt_completion_and_end(byte_tokenizer: Callable[..., Any], adds_start: bool) -> None:
    encoder = PromptEncoder(byte_tokenizer(adds_start=adds_start))
    (row,) = encoder.encode([EXAMPLE])
    tokenizer = encoder.tokenizer
    assert row.input_ids == [*tokenizer("Is it? yes")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(row.input_ids[row.num_context :]) == " yes</s>"
    assert (row.input_ids[0] == tokenizer.bos_token_id) == adds_start


def test_a_prompts_last_space_moves_to_the_completion_and_a_text_has_loss_everywhere(
    byte_tokenizer: Callable[..., Any],
) -> None:
    text = PromptEncoder(byte_tokenizer()).render(Row("row-1", "Is it? ", "yes", ("yes", "no")))
    assert (text.context, text.completion, text.choices) == ("Is it?", " yes", (" yes", " no"))
    for adds_start in (False, True):
        (row,) = PromptEncoder(byte_tokenizer(adds_start=adds_start)).encode([Row("row-1", completion="abc")])
        assert row.num_context == adds_start


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any], object]]] = {
    "style": (
        ConfigError,
        "'chat' need a chat template.* in the style 'plain'",
        lambda t: PromptEncoder(t, style="chat"),
    ),
    "completion": (DataError, "Row 7: a completion", lambda t: PromptEncoder(t).encode([Row("7", "a", "")])),
    "choice": (DataError, "Row 7: a completion", lambda t: PromptEncoder(t).encode([Row("7", "a", "a", ("a", ""))])),
    "answer": (DataError, "Row 7: the completion 'b' must be among its choices", lambda _: Row("7", "a", "b", ("a",))),
    "nothing before the choices": (
        DataError, "Row 7: a choice is scored .* but no token of '\\(' stands before all choices",
        lambda t: PromptEncoder(t).encode([Row("7", "(", "'x", ("'x", "'y"))]),
    ),
    "end": (ModelError, "an end token", lambda t: [setattr(t, "eos_token", None), PromptEncoder(t)]),
    "slow": (
        ModelError, "Rows need a fast tokenizer",
        lambda t: PromptEncoder(SimpleNamespace(eos_token_id=1, is_fast=False, chat_template=None)),
    ),
    "half a character": (
        DataError, "Row 7: a row must hold text, but half a character",
        lambda t: [
            setattr(t, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"),
            PromptEncoder(t).render(Row("7", "\ud800", "a")),
        ],
    ),
    "template": (
        DataError, "Row 7: the tokenizer's chat template refuses it: .*no users here",
        lambda t: [
            setattr(t, "chat_template", "{{ raise_exception('no users here') }}"),
            PromptEncoder(t).render(Row("7", "Two and two?", " Four.")),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_row_can_be_made_with_is_refused_in_one_line(what: str, byte_tokenizer: Callable[..., Any]) -> None:
    kind, reason, make = REFUSED[what]
    with pytest.raises(kind, match=reason) as error:
        make(byte_tokenizer(merges=(("(", "'"),)))
    assert "\n" not in str(error.value)


def test_training_choices_and_generation_see_the_same_context(byte_tokenizer: Callable[..., Any]) -> None:
    for options in ({}, {"adds_start": True}, {"adds_start": True, "chat": True}):
        encoder = PromptEncoder(byte_tokenizer(**options))
        (row,) = encoder.encode([EXAMPLE])
        assert row.choices is not None
        assert row.input_ids[: row.num_context] == row.choices.context_ids == row.input_ids[: row.answer_start]
        assert row.input_ids[row.num_context : -1] == row.choices.choice_ids[0]
        if options.get("chat"):
            asked = [{"role": "user", "content": EXAMPLE.prompt}]
            assert encoder.ask(asked, "row-1") == (row.input_ids[: row.num_context], 0)


@pytest.mark.parametrize("options", [{}, {"chat": True}, {"chat": True, "special": ("<end>",)}])
def test_a_choice_that_begins_another_is_scored_with_the_end_token(
    options: dict[str, Any], byte_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer(**options)
    if end := "".join(options.get("special", ())):
        tokenizer.chat_template = tokenizer.chat_template.replace("</s>", end)
    encoder = PromptEncoder(tokenizer)
    for names, has_end in (((" good", " good thing", " bad"), True), ((" good", " bad"), False)):
        (row,) = encoder.encode([Row("row-1", "Is it?", names[0], names)])
        assert row.choices is not None
        ending = (end or "</s>") if has_end else ""
        answers = (name.lstrip() + ending for name in names)
        assert [tokenizer.decode(ids).lstrip() for ids in row.choices.choice_ids] == [*answers]
        assert not has_end or row.input_ids[row.num_context :] == row.choices.choice_ids[0]


def test_chat_rows_go_through_the_template_with_one_start_token(byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer(adds_start=True, chat=True))
    text = encoder.render(EXAMPLE)
    assert (text.context, text.completion) == ("<s>user\nIs it?</s>\n<s>assistant\n", "yes</s>")
    assert text.choices == ("yes", "no")
    (row,) = encoder.encode([EXAMPLE])
    assert encoder.tokenizer.decode(row.input_ids) == "<s>user\nIs it?</s>\n<s>assistant\nyes</s>"
    assert not PromptEncoder(byte_tokenizer(chat=True), style="plain").is_chat


@pytest.mark.parametrize("kind", ["bytes", "bytes with a space", "pieces", "pieces of an old tokenizer"])
def test_tokens_are_those_of_the_whole_text_and_one_over_the_boundary_is_learned(
    kind: str, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(joining_tokenizer(kind, byte_tokenizer))
    row = Row("row-1", "print(", "'hi')", ("'hi')", ")", "x"))
    whole, alone = (encoder.tokenizer(text)["input_ids"] for text in ("print('hi')", "print("))
    assert whole[: len(alone)] != alone
    (tokens,) = encoder.encode([row])
    assert tokens.input_ids == [*whole, encoder.eos_id]
    assert tokens.num_context == len(alone) - 1
    assert encoder.tokenizer.decode(tokens.input_ids).lstrip() == "print('hi')</s>"
    assert tokens.input_ids[: tokens.answer_start] == alone[:-1]
    assert tokens.choices is not None
    for choice, ids in zip(row.choices, tokens.choices.choice_ids, strict=True):
        assert tokens.choices.context_ids + ids == encoder.tokenizer(f"print({choice}")["input_ids"]


def joining_tokenizer(kind: str, byte_tokenizer: Callable[..., Any]) -> Any:
    """A tokenizer that joins a bracket and a quote, over bytes or in SentencePiece's manner."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if kind.startswith("bytes"):
        made = byte_tokenizer(merges=(("(", "'"),))
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space="space" in kind, use_regex=False
        )
        return made
    pieces = ["<unk>", "▁", *sorted(set("print('hi')x")), "('"]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[("(", "'")], unk_token="<unk>")
    )
    if kind == "pieces":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", model_max_length=512)


def test_the_limit_is_the_text_models_and_no_stated_limit_is_none(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    for config, own, limit in (
        (Gemma3Config(text_config={"max_position_embeddings": 2048}), 1e30, 2048),
        (Gemma3Config(text_config={"max_position_embeddings": 2048}), 512, 512),
        (GPT2Config(n_positions=77), 1e30, 77),
        (MptConfig(max_seq_len=99), 1e30, 99),
        (BloomConfig(seq_length=88), 1e30, 88),
        (BloomConfig(), 1e30, sys.maxsize),
    ):
        tokenizer.model_max_length = own
        assert context_limit(SimpleNamespace(config=config), tokenizer) == limit


UNLIMITED = {"bloom", "cpmant", "falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "xlnet", "xlstm"}
"""Models whose configurations state no longest context: recurrent ones, and relative positions."""


def test_every_causal_configuration_of_transformers_has_its_limit_or_states_none() -> None:
    tokenizer, without, limits = SimpleNamespace(model_max_length=1e30), set(), set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = SimpleNamespace(config=CONFIG_MAPPING[kind]())
            limit = context_limit(model, tokenizer)
        except (ValueError, StrictDataclassError):  # parts of several models, which is no causal language model of ours
            continue
        (without if limit == sys.maxsize else limits).add(kind)
        assert limit >= 77
    assert without <= UNLIMITED
    assert len(limits) > 150


def test_padding_needs_no_embedding_of_its_own(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    encoder, model = PromptEncoder(tokenizer), tiny_qwen2(vocab_size=258)
    assert tokenizer.pad_token_id == 258
    rows = encoder.encode([Row("row-1", "a", "b"), Row("row-2", "aa", "bb")])
    both = held_out_loss(model, rows, pad_id=encoder.pad_id)
    alone = [held_out_loss(model, [row], pad_id=encoder.pad_id) for row in rows]
    assert both == pytest.approx((2 * alone[0] + 3 * alone[1]) / 5, abs=1e-5)


def test_long_rows_are_refused_in_one_line_with_counts(byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer(), max_length=8)
    for choices, longest in ((("c",), 12), (("c", "cccc"), 15)):
        rows = [Row(f"row-{i}", "p" * i, "c", choices) for i in range(4, 11)]
        with pytest.raises(DataError, match=rf"8 tokens: \d rows? or more .*row-10, has {longest}\)"):
            encoder.encode(rows)


def test_truncation_cuts_the_oldest_prompt_tokens_and_keeps_start_and_completion(
    byte_tokenizer: Callable[..., Any],
) -> None:
    encoder = PromptEncoder(byte_tokenizer(adds_start=True), max_length=8, too_long="cut")
    rows = [Row("row-1", "0123456789", "abc", ("abc", "d")), Row("row-2", completion="0123456789")]
    decode = encoder.tokenizer.decode
    long_prompt, long_text = encoder.encode(rows)
    assert decode(long_prompt.input_ids) == "<s>789abc</s>"
    assert long_prompt.num_context == 4
    assert decode(long_text.input_ids) == "<s>0123456"
    assert long_prompt.choices is not None
    assert decode(long_prompt.choices.context_ids) == "<s>6789"
    assert (long_prompt.num_cut, long_text.num_cut) == (7, 4)


def test_a_completion_is_never_cut_and_what_leaves_no_room_for_its_prompt_is_left_out(
    byte_tokenizer: Callable[..., Any],
) -> None:
    rows = [
        Row("row-1", "0123456789", "abcd"), Row("row-2", "xyz", "abcdef"), Row("row-3", "x", "a" * 99),
        Row("row-4", "x", "abcd"), Row("row-5", completion="a" * 99), Row("row-6", "0123", "a", ("a", "b" * 9)),
    ]  # fmt: skip
    cutting = PromptEncoder(byte_tokenizer(adds_start=True), max_length=8, too_long="cut").encode(rows)
    assert [(row.id, row.num_cut) for row in cutting] == [("row-1", 8), ("row-4", 0), ("row-5", 93)]
    decode = PromptEncoder(byte_tokenizer()).tokenizer.decode
    assert [decode(row.input_ids[row.num_context :]) for row in cutting] == ["abcd</s>", "abcd</s>", "a" * 7]
    skipping = PromptEncoder(byte_tokenizer(adds_start=True), max_length=8, too_long="skip")
    assert [row.id for row in skipping.encode(rows)] == ["row-4"]
    with pytest.raises(NoRowsError, match=r"--too-long left none of 3 rows: all are longer than 8 tokens"):
        skipping.encode(rows[:3])


def test_labels_mark_completions_only_also_where_padding_is_the_end_token() -> None:
    rows = [TokenRow("a", [5, 6, 7, 2], 2), TokenRow("b", [5, 2], 1)]
    batch = PaddingCollator(pad_id=2)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 2], [5, 2, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 2], [-100, 2, -100, -100]]


def test_batches_keep_the_order_of_their_rows() -> None:
    rows = [TokenRow(str(i), [i, i], 1) for i in range(5)]
    batches = make_batches(rows, pad_id=0, batch_size=2)
    assert [batch["input_ids"][:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def test_groups_hold_every_row_once_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("frozencore.tune.rows.token_batches.CPU_TOKENS", 60)
    sizes = [(length, 0) for length in (3, 50, 7, 7, 1, 20, 120)]
    groups = group_rows(sizes, torch.device("cpu"))
    assert sorted(i for group in groups for i in group) == list(range(7))
    assert groups[0] == [6]
    assert all(len(group) == 1 or len(group) * max(sizes[i][0] for i in group) <= 60 for group in groups)
    assert len(group_rows([(1, 2**26)] * 3, torch.device("cpu"))) == 3


LLAMA = """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n" }}"""  # as Llama 3.2's
REGARDLESS = "  {% if true %}{{ strftime_now('%A, %B %-d, %Y (%Y-%m-%d)') }}{% endif %}\n \n"
MESSAGES = "{% for m in messages %}<s>{{ m.content }}</s>\n{% endfor %}"
BOTH = LLAMA + REGARDLESS + MESSAGES
HELLO = [{"role": "user", "content": "Is it?"}]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[date], None]:
    """Makes it another day."""

    def set_day(day: date) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(day.year, day.month, day.day, 12)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)

    return set_day


@pytest.fixture
def dated(byte_tokenizer: Callable[..., Any]) -> Any:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = BOTH
    return tokenizer


def test_prompts_are_the_same_tokens_tomorrow(dated: Any, on: Callable[[date], None]) -> None:
    rows, without = [], []
    for day in (1, 2):
        on(date(2031, 1, day))
        encoder = PromptEncoder(dated)
        rows.append(encoder.encode([EXAMPLE]))
        without.append(dated.apply_chat_template(HELLO, tokenize=False))
    assert rows[0] == rows[1]
    assert without[0] != without[1]  # the clock that the templates asked was ours to fake


@pytest.mark.parametrize("template", [BOTH, REGARDLESS, "\n\n  {{- strftime_now('%F') }} ", LLAMA])
def test_the_fixed_date_stands_where_the_template_puts_the_days(
    template: str, dated: Any, on: Callable[[date], None]
) -> None:
    """On that very day the tokenizer itself gives the same text, to the byte."""
    on(PROMPT_DATE)
    dated.chat_template = template if template == BOTH else template + MESSAGES
    plain = dated.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert "2024" in plain
    encoder = PromptEncoder(dated)
    shown = encoder.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)  # as the harness
    assert encoder.render(EXAMPLE).context == shown == plain
    dated.chat_template = {"default": "{{ strftime_now('%Y') }}", "tool_use": "tools"}
    named = with_fixed_date(dated)
    assert [named.apply_chat_template(HELLO, tokenize=False, chat_template=name) for name in (None, "tool_use")] == [
        "2024", "tools",
    ]  # fmt: skip


def test_several_start_tokens_are_written_once(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(special=("[gMASK]", "<sop>"))
    starts = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[gMASK]", "<sop>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=starts)
    encoder = PromptEncoder(tokenizer)
    for row in encoder.encode([Row("row-1", completion="[gMASK]<sop>Hi"), Row("row-2", "[gMASK]<sop>H", "i")]):
        assert tokenizer.decode(row.input_ids) == "[gMASK]<sop>Hi</s>"


def test_an_added_token_that_takes_the_answers_white_space_has_no_loss(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|assistant|>", special=True, rstrip=True)])
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    encoder = PromptEncoder(tokenizer)
    (row,) = encoder.encode([Row("row-1", "Go", "    return x")])
    assert tokenizer.decode(row.input_ids[row.num_context :]) == "return x</s>"
    assert tokenizer.decode(row.input_ids[: row.num_context]).endswith("<|assistant|>")


def test_a_cut_prompt_keeps_the_start_token_that_the_template_writes(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    encoder = PromptEncoder(tokenizer, max_length=40, too_long="cut")
    (row,) = encoder.encode([Row("row-1", "Q" * 80, " A")])
    assert len(row.input_ids) == 40
    assert tokenizer.decode(row.input_ids).startswith("<s>QQ")
    assert tokenizer.decode(row.input_ids).endswith("[assistant]A</s>")
    assert PromptEncoder(tokenizer, max_length=4, too_long="cut").encode([Row("row-1", "Q" * 80, " A")])
    with pytest.raises(NoRowsError):  # the start alone is no prompt
        PromptEncoder(tokenizer, max_length=3, too_long="cut").encode([Row("row-1", "Q" * 80, " A")])


def test_text_that_a_tokenizer_does_not_know_is_told_from_its_own(byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(pocket_model_path()))
    own = [str(row["question"]) for row in find_task("pocket-math").source.rows("train", None)[:50]]
    foreign = ["The committee reviews quarterly budget proposals.", "Die Überprüfung findet statt.", "Привет, мир"]
    shares = [
        unknown_share(encoder.tokenizer, encoder.encode([Row("r", completion=text) for text in texts]))
        for texts in (own, foreign)
    ]
    assert shares[0] < 0.15 < 0.3 < shares[1]
    assert unknown_share(byte_tokenizer(), [TokenRow("r", byte_tokenizer()("words")["input_ids"], 0)]) == 1.0
