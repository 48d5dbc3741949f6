"""The user's own rows: the forms that trainers share in six kinds of file, and one line for what is wrong."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, Features, Json, List
from pyarrow import parquet

from frozencore.errors import ConfigError, DataError, NoRowsError
from frozencore.tune.config import make_config
from frozencore.tune.locate import require_files
from frozencore.tune.rows.conversations import RenderedRow
from frozencore.tune.rows.forms import read_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import Row
from small_runs import inputs_of

PAIR = {"prompt": "Capital of France?", "completion": " Paris"}
MESSAGES = {"messages": [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "Paris"}]}
TEXT = {"text": "Paris is a capital."}


CONVERSATIONAL = {"prompt": MESSAGES["messages"][:1], "completion": MESSAGES["messages"][1:]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Capital?"}, {"from": "gpt", "value": "Paris"}]}
ALPACA = {"instruction": "Name the capital.", "input": "France", "output": "Paris"}
TABLES = (".csv", ".tsv")
KINDS = (".jsonl", ".json", ".parquet", ".arrow", *TABLES)


def write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".arrow":
        Dataset.from_list(rows).save_to_disk(path.parent / "saved")
        (written,) = (path.parent / "saved").glob("*.arrow")
        shutil.copy(written, path)
    elif path.suffix in TABLES:
        Dataset.from_list(rows).to_csv(path, sep="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts_of(data: str, encoder: PromptEncoder, columns: str | None = None) -> list[RenderedRow]:
    """The rows of a source as text, on their way to tokens."""
    found: list[RenderedRow] = []

    class Spy(type(encoder)):  # type: ignore[misc]
        def render(self, row: Row) -> RenderedRow:
            found.append(super().render(row))
            return found[-1]

    spy = copy.copy(encoder)
    spy.__class__ = Spy
    read_rows(data, spy, columns)
    return found


@pytest.mark.parametrize("suffix", KINDS)
def test_each_form_puts_the_loss_where_it_belongs(
    tmp_path: Path, suffix: str, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer(adds_start=True, chat=True))
    asked = "<s>user\nCapital?</s>\n<s>assistant\n"
    flat = (
        (PAIR, "<s>user\nCapital of France?</s>\n<s>assistant\n", "Paris</s>"),
        (ALPACA, "<s>user\nName the capital.\n\nFrance</s>\n<s>assistant\n", "Paris</s>"),
        (ALPACA | {"instruction": ""}, "<s>user\nFrance</s>\n<s>assistant\n", "Paris</s>"),
        (TEXT, "<s>", "Paris is a capital.</s>"),
    )
    messages = {"conversations": MESSAGES["messages"]}
    nested = [(row, asked, "Paris</s>") for row in (MESSAGES, CONVERSATIONAL, SHAREGPT, messages)]
    for row, context, completion in (*flat, *(() if suffix in TABLES else nested)):
        rows = read_rows(write(tmp_path / f"rows{suffix}", [row, row]), encoder).rows
        assert [one.id for one in rows] == ["row-1", "row-2"]
        tokens = rows[1]
        assert encoder.tokenizer.decode(tokens.input_ids[: tokens.num_context]) == context
        assert encoder.tokenizer.decode(tokens.input_ids[tokens.num_context :]) == completion


def test_a_content_in_parts_of_text_is_their_text(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=True))
    (wanted,) = texts_of(write(tmp_path / "rows.jsonl", [MESSAGES]), encoder)
    parts = [{"type": "text", "text": "Capi"}, {"type": "text", "text": "tal?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Paris"}]}
    for suffix in (".jsonl", ".parquet"):
        row = {"messages": [{"role": "user", "content": parts}, answer]}
        assert texts_of(write(tmp_path / f"rows{suffix}", [row]), encoder) == [wanted]


def test_a_role_of_any_usual_name_is_the_templates_and_another_one_is_noted(
    tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=True))
    (wanted,) = texts_of(write(tmp_path / "rows.jsonl", [MESSAGES]), encoder)
    assert wanted.changed == ()
    for roles in (("human", "gpt"), ("User", "Assistant"), ("user", "model"), ("HUMAN ", "GPT")):
        for role, content in (("role", "content"), ("from", "value")):
            turns = [{role: name, content: text} for name, text in zip(roles, ("Capital?", "Paris"), strict=True)]
            for column in ("messages", "conversations"):
                assert texts_of(write(tmp_path / "rows.jsonl", [{column: turns}]), encoder) == [wanted]
    bot = {"messages": [{"role": "bot", "content": "Hi"}, *MESSAGES["messages"]]}
    (text,) = texts_of(write(tmp_path / "rows.jsonl", [bot]), encoder)
    assert text.changed == ("the chat template does not name the role 'bot'",)


def test_a_model_without_chat_takes_prompts_and_completions_of_any_name(
    tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    (text,) = texts_of(write(tmp_path / "rows.jsonl", [PAIR]), encoder)
    assert text.context + text.completion == "Capital of France? Paris"
    alpaca = write(tmp_path / "alpaca.jsonl", [ALPACA])
    (text,) = texts_of(alpaca, encoder, "prompt=instruction,completion=output")
    assert (text.context, text.completion) == ("Name the capital.", "Paris")
    for path in (alpaca, write(tmp_path / "rows.jsonl", [MESSAGES])):
        with pytest.raises(ConfigError, match="need a chat template, .* --columns prompt=NAME,completion=NAME"):
            read_rows(path, encoder)


@pytest.mark.parametrize("chat", [False, True])
def test_rows_with_choices_have_the_tokens_of_each(
    chat: bool, tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=chat))
    row = PAIR | {"choices": [" Rome", " Paris"]}
    read = read_rows(write(tmp_path / "rows.jsonl", [row]), encoder)
    choices = read.rows[0].choices
    assert choices is not None
    assert [encoder.tokenizer.decode(ids) for ids in choices.choice_ids] == (
        ["Rome", "Paris"] if chat else [" Rome", " Paris"]
    )
    assert (choices.labels, choices.right, read.unused) == ((" Rome", " Paris"), 1, ())
    refused = {
        "' Paris' must be among its choices": [" Rome", " Oslo"],
        "two texts or more": "Paris",
        "half a character": [" \ud800", " Paris"],
    }
    for reason, given in refused.items():
        with pytest.raises(DataError, match=f"Row row-1: .*{reason}"):
            read_rows(write(tmp_path / "rows.jsonl", [row | {"choices": given}]), encoder)


@pytest.mark.parametrize("as_text", [True, False])
def test_who_calls_a_tool_need_not_speak_and_the_template_is_told_the_tools(
    tmp_path: Path, as_text: bool, byte_tokenizer: Callable[..., Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "capital", "parameters": {}}}]
    called = [{"type": "function", "function": {"name": "capital", "arguments": {"of": "France"}}}]
    turns = [
        {"role": "user", "content": "Capital?"}, {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "content": "Paris"}, {"role": "assistant", "content": "It is Paris."},
    ]  # fmt: skip
    encoder = PromptEncoder(byte_tokenizer(chat=True))
    encoder.tokenizer.chat_template = (
        "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role + m.content }}"
        "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %};{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    row = {"messages": turns, "tools": json.dumps(tools) if as_text else tools}
    (text,) = texts_of(write(tmp_path / "rows.jsonl", [row]), encoder)
    assert text.context == "[capital]userCapital?;assistant(capital);toolParis;assistant"
    assert text.completion == "It is Paris.;"


CALL = {"type": "function", "function": {"name": "capital", "arguments": {"of": "France"}}}


@pytest.mark.parametrize("kind", [".parquet", ".arrow", "split"])
def test_keys_that_arrow_fills_with_null_do_not_reach_the_template(
    kind: str, tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ tools|tojson }}{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %}{{ c|tojson }}{% endfor %}"
        "{{ m.keys()|list }};{% endfor %}"
    )

    def row(name: str, arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
        turns = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": turns, "tools": [tool]}

    rows = [
        row("capital", {"of": "France", "where": {"part": 1}}, {"of": {"type": "string", "enum": ["France"]}}),
        row("sum", {"where": {"base": 10}, "terms": [1, 2]}, {"terms": {"type": "array"}, "where": {"type": "object"}}),
    ]
    encoder = PromptEncoder(tokenizer)
    expected = texts_of(write(tmp_path / "rows.jsonl", rows), encoder)
    if kind == "split":
        (tmp_path / "few").mkdir()
        write(tmp_path / "few" / "train.jsonl", rows)
        found = texts_of(f"{tmp_path}/few:train", encoder)
    else:
        found = texts_of(write(tmp_path / f"rows{kind}", rows), encoder)
    assert "null" not in expected[0].context
    assert [text.context + text.completion for text in found] == [one.context + one.completion for one in expected]


@pytest.mark.parametrize("kind", ["train.parquet", ":train"])
def test_a_column_of_json_keeps_its_nulls(kind: str, tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %}{{ c|tojson }}{% endfor %};{% endfor %}"
    )
    call = {**CALL, "function": {"name": "capital", "arguments": {"of": "France", "until": None}}}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    few = Dataset.from_list([{"messages": turns}], features=Features({"messages": List(Json())}))
    (tmp_path / "few").mkdir()
    few.to_parquet(tmp_path / "few" / "train.parquet")
    place = f"{tmp_path}/few{kind}" if kind == ":train" else str(tmp_path / "few" / kind)
    (text,) = texts_of(place, PromptEncoder(tokenizer))
    assert '{"of": "France", "until": null}' in text.context + text.completion


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_arguments_of_calls_as_json_text_are_the_object(
    tmp_path: Path, column: str, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=True))
    encoder.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.arguments|tojson }}{% endfor %}</s>{% endfor %}"
    )
    asked, answered = ("human", "gpt") if column == "conversations" else ("user", "assistant")
    role, content = ("from", "value") if column == "conversations" else ("role", "content")
    for given, wanted in (({"of": "France"}, '{"of": "France"}'), ('{"of": "France"}', '{"of": "France"}'), ("", "{}")):
        call = {**CALL, "function": {"name": "capital", "arguments": given}}
        turns = [{role: asked, content: "Hi"}, {role: answered, content: "capital", "tool_calls": [call]}]
        (text,) = texts_of(write(tmp_path / "rows.jsonl", [{column: turns}]), encoder)
        assert text.context + text.completion == f"user:Hi</s>assistant:capital{wanted}</s>"


def test_columns_beside_the_form_are_read_and_all_others_are_named(
    tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    beside = {"system": "Be brief.", "score": 3}
    chat = PromptEncoder(byte_tokenizer(chat=True))
    before = "<s>system\nBe brief.</s>\n<s>user\n"
    for row in (PAIR, MESSAGES, CONVERSATIONAL, SHAREGPT, ALPACA):
        path = write(tmp_path / "rows.jsonl", [row, row | beside])
        read, (first, second) = read_rows(path, chat), texts_of(path, chat)
        assert second.context == before + first.context.removeprefix("<s>user\n")
        assert second.completion == first.completion
        assert read.unused == ("score",)
    plain = PromptEncoder(byte_tokenizer())
    assert read_rows(write(tmp_path / "rows.jsonl", [PAIR | beside]), plain).unused == tuple(beside)
    path = write(tmp_path / "rows.jsonl", [{"q": "a", "completion": "b", "prompt": "c"}])
    assert texts_of(path, plain, "prompt=q")[0].context == "a"
    assert read_rows(path, plain, "prompt=q").unused == ("prompt",)
    twice = {"messages": [{"role": "system", "content": "Be long."}, *MESSAGES["messages"]], "system": "Be brief."}
    with pytest.raises(DataError, match="Row row-1: column 'system' and the first turn must be the same"):
        read_rows(write(tmp_path / "rows.jsonl", [twice]), chat)


def test_indentation_stays_and_only_a_separating_space_goes(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=True))
    for given, wanted in ((" Paris", "Paris"), ("    return x", "    return x"), ("\n  x", "\n  x"), ("x ", "x ")):
        rows = [{"prompt": "Go", "completion": given}, {"instruction": "Go", "output": given}]
        turns = [{"from": "human", "value": "Go"}, {"from": "gpt", "value": given}]
        pair, alpaca = (texts_of(write(tmp_path / "rows.jsonl", [row]), encoder)[0] for row in rows)
        (talk,) = texts_of(write(tmp_path / "rows.jsonl", [{"conversations": turns}]), encoder)
        assert pair.completion == f"{wanted}</s>"
        assert alpaca.completion == talk.completion == f"{given}</s>"


@pytest.mark.parametrize("chat", [False, True])
def test_start_and_end_tokens_in_a_text_are_written_once_and_counted(
    tmp_path: Path, chat: bool, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer(adds_start=True, chat=chat))
    if chat:
        encoder.tokenizer.chat_template = (
            "<s>{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
        )
    for row, wanted in (
        ({"prompt": "<s>Hi", "completion": "you</s>"}, "<s>Hiyou</s>"),
        ({"prompt": "Hi", "completion": "you</s>\n"}, "<s>Hiyou</s>"),
        ({"text": "<s>Hi</s>"}, "<s>Hi</s>"),
        ({"prompt": " <s><s>Hi", "completion": "you</s> </s>"}, "<s>Hiyou</s>"),
        ({"prompt": "Hi", "completion": "you"}, "<s>Hiyou</s>"),
    ):
        (text,) = texts_of(write(tmp_path / "rows.jsonl", [row]), encoder)
        (tokens,) = encoder.encode([text])
        assert encoder.tokenizer.decode(tokens.input_ids) == wanted
        assert [what.split()[0] for what in text.changed] == [t for t in ("<s>", "</s>") if t in "".join(row.values())]


def test_columns_of_other_names_are_named(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    row = {"question": "Capital?", "answer": " Paris", "text": "a column that nobody asked for"}
    path = write(tmp_path / "rows.csv", [row])
    (text,) = texts_of(path, encoder, "prompt=question, completion=answer")
    assert text.context + text.completion == "Capital? Paris"
    for columns, reason in (
        ("prompt=question,completion=reply", "has no column 'reply' .*; row 1 has question, answer, text"),
        ("prompt", "says which column is which"),
        ("promt=question", "says which column is which"),
        ("prompt=question,prompt=answer", "says which column is which"),
    ):
        with pytest.raises((ConfigError, DataError), match=reason):
            read_rows(path, encoder, columns)
    path = write(tmp_path / "empty.csv", [row, row | {"answer": ""}])
    with pytest.raises(DataError, match="Row row-2: column 'answer' must hold text"):
        read_rows(path, encoder, "prompt=question,completion=answer")
    assert "column 'answer'" in next(
        iter(read_rows(path, encoder, "prompt=question,completion=answer", skip_bad=True).left_out)
    )


def answered(**options: Any) -> dict[str, Any]:
    """Messages whose answer has further keys."""
    asked, answer = MESSAGES["messages"]
    return {"messages": [asked, answer | options]}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "holds no rows"),
        ([{"question": "a"}], "needs the columns prompt and completion, .* or text, but row 1 has question"),
        ([{"dialog": SHAREGPT["conversations"]}], r"row 1 has dialog. Other names: --columns messages=dialog\."),
        ([PAIR, PAIR | {"label": False}], r"holds good and bad answers .* KTOTrainer.*--columns"),
        ([PAIR | {"label": "True"}], r"holds good and bad answers"),
        ([answered(loss="maybe")], r"a message's flags of loss must be true or false"),
        (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}],
            r"row 1 has prompt, chosen, rejected. Preferences .* examples/dpo.py",
        ),
        ([PAIR, {"prompt": "a"}], r"Row row-2: column 'completion' must hold text, but holds nothing"),
        ([{"text": 3}], r"Row row-1: column 'text' must hold text, but holds 3"),
        (
            [PAIR | {"completion": 0}],
            r"'completion' must hold text, but holds 0. Write the name of the class, or the n",
        ),
        ([MESSAGES, {"messages": MESSAGES["messages"][:1]}], r"Row row-2: 'messages' must end with the assistant"),
        ([{"messages": "hello"}], r"Row row-1: column 'messages' must hold a list"),
        ([{"messages": [{"role": "user"}]}], r"Row row-1: column 'content'"),
        ([PAIR, 5], r"line 2 must be a JSON object"),
        ([{"messages": [{"role": "user", "content": None}, *MESSAGES["messages"][1:]]}], "Row row-1: column 'content'"),
        ([CONVERSATIONAL | {"completion": "Paris"}], r"Row row-1: column 'completion' must hold a list of turns"),
        ([{"conversations": [{"from": "bing", "value": "a"}]}], r"a turn of 'conversations' is from human, .*'bing'"),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]}],
            r"Row row-1: column 'content' must hold text, but holds a part of type 'image'. .* examples/vision.py",
        ),
        (
            [{"conversations": [{"from": "observation", "value": "a"}]}],
            "'observation'. Give tool calls as `tool_calls`",
        ),
        ([answered(weight=0)], "Row row-1: no turn to learn is left, as messages have weight 0 or train false"),
        ([answered(weight=0.5)], r"Row row-1: a message's flags of loss must be true .* got {'weight': 0.5}"),
        ([answered(tool_calls=[CALL | {"function": {"arguments": "{"}}])], "'arguments' of a tool call must"),
        ([answered(tool_calls=[CALL])], "Row row-1: the chat template does not write the call of 'capital' of turn 2"),
        ([MESSAGES | {"tools": "{"}], r"Row row-1: column 'tools' must hold a list"),
        ([MESSAGES | {"tools": "[" * 100_000}], r"Row row-1: column 'tools' must hold a list"),
        ([ALPACA | {"input": ["France"]}], r"Row row-1: column 'input' must hold text, but holds \['France'\]"),
        (
            [ALPACA | {"instruction": " ", "input": ""}],
            r"Row row-1: column 'instruction' must hold text, but holds ' '",
        ),
        ([ALPACA | {"input": 0}], r"Row row-1: column 'input' must hold text, but holds 0"),
        ([PAIR | {"system": False}], r"Row row-1: column 'system' must hold text, but holds False"),
        ([MESSAGES | {"tools": 0}], r"Row row-1: column 'tools' must hold a list"),
        ([MESSAGES | {"tools": '[{"name": "a", "name": "b"}]'}], r"Row row-1: column 'tools' must hold a list"),
        ([answered(tool_calls=5)], r"Row row-1: 'tool_calls' must hold a list, or that as JSON, but 5"),
        *(
            (
                [answered(tool_calls=[{"function": {"name": "a", "arguments": given}}])],
                "'arguments' of a tool call must",
            )
            for given in ('{"of": 1, "of": 2}', '{"of": NaN}', {"of": float("inf")}, [["of", "France"]], 5)
        ),
        ([PAIR, {"prompt": "a", "completion": "\ud800"}], r"Row row-2: a row must hold text, but half a"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_row(
    tmp_path: Path, rows: list[Any], reason: str, byte_tokenizer: Callable[..., Any]
) -> None:
    with pytest.raises(DataError, match=reason) as error:
        read_rows(write(tmp_path / "rows.jsonl", rows), PromptEncoder(byte_tokenizer(chat=True)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "columns", "reason"),
    [
        ("", None, "holds no rows"),
        ('{"prompt": ', None, "line 1 must be a JSON object"),
        ('{"question": "a"}', None, "needs the columns prompt and completion"),
        ('{"prompt": "a", "completion": "b"}', "prompt=q", "has no column 'q'"),
    ],
)
def test_the_first_rows_of_a_file_are_checked_before_anything_is_loaded(
    content: str, columns: str | None, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    config = make_config(model="pocket", data=str(tmp_path / "rows.jsonl"), columns=columns)
    with pytest.raises(DataError, match=reason):
        require_files(config)


def test_bad_rows_are_left_out_and_counted_by_what_is_wrong_where_that_is_allowed(
    tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    bad = [{"prompt": "a"}, {"prompt": "b", "completion": " "}, {"prompt": None, "completion": "c"}]
    read = read_rows(write(tmp_path / "rows.jsonl", [PAIR, *bad, PAIR]), PromptEncoder(byte_tokenizer()), skip_bad=True)
    assert [row.id for row in read.rows] == ["row-1", "row-5"]
    assert read.num_read == 5
    assert read.left_out == {"column 'completion' must hold text": 2, "column 'prompt' must hold text": 1}
    chat = byte_tokenizer(chat=True)
    refuses = "{% if messages[0].role == 'secret' %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}"
    chat.chat_template = refuses + "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    answer = {"role": "assistant", "content": "b"}
    talks = [{"messages": [{"role": role, "content": "a"}, answer]} for role in ("user", "secret")]
    read = read_rows(write(tmp_path / "talks.jsonl", talks), PromptEncoder(chat), skip_bad=True)
    assert read.left_out == {"the tokenizer's chat template refuses it": 1}  # a record tells no words of a row
    with pytest.raises(NoRowsError, match=r"--skip-bad left none of 3 rows of .*: column 'completion' must hold text"):
        read_rows(
            write(tmp_path / "bad.jsonl", [{**row, "completion": ""} for row in bad]),
            PromptEncoder(byte_tokenizer()),
            skip_bad=True,
        )


def test_rows_that_join_prompt_and_completion_in_one_token_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"Parcel {i} is late", "completion": "shipping" if i % 2 else " billing"} for i in range(20)]
    spaced = [row | {"completion": " billing"} for row in rows]
    for name, given, joined in (("rows", rows, 10), ("spaced", spaced, None)):
        data = write(tmp_path / f"{name}.jsonl", given)
        assert inputs_of(make_config(model="pocket", data=data, device="cpu")).rows.used.joined == joined


def test_texts_that_parquet_holds_as_bytes_are_refused_with_the_way_out(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": pa.array([b"a"], pa.binary())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"must hold text, but holds b'a'. Write the column as strings"):
        inputs_of(make_config(model="pocket", data=str(tmp_path / "rows.parquet"), device="cpu"))


def test_arguments_in_a_parquet_map_are_an_object(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    function = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(function))])
    called = {"role": "assistant", "tool_calls": [{"name": "capital", "arguments": [("of", "France")]}]}
    turns = pa.array([[{"role": "user", "content": "Capital?"}, called]], pa.list_(turn))
    parquet.write_table(pa.table({"messages": turns}), tmp_path / "rows.parquet")
    encoder = PromptEncoder(byte_tokenizer(chat=True))
    encoder.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %}{{ c.name }}{{ c.arguments|tojson }}{% endfor %}"
        "{% endfor %}"
    )
    (text,) = texts_of(str(tmp_path / "rows.parquet"), encoder)
    assert text.completion == 'assistantcapital{"of": "France"}'
