"""Turn the columns of a file into rows, in the usual forms of trainers.

    {"prompt": "Capital of France?", "completion": " Paris"}
    {"prompt": "Capital of France?", "completion": " Paris", "choices": [" Paris", " Rome"]}
    {"prompt": [{"role": "user", "content": "Capital of France?"}], "completion": [{"role": "assistant", ...}]}
    {"messages": [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "Paris"}]}
    {"instruction": "Name the capital.", "input": "France", "output": "Paris"}            (Alpaca)
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}   (ShareGPT)
    {"conversations": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"text": "Paris is the capital of France."}

The loss is on the completion (the assistant's turns of it), the output, the assistant's last turn, or the whole text.
Turns may call tools, listed in the column ``tools``; the ``content`` of such a turn may be null. The column ``system``
is the first message of a conversation.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from frozencore.errors import ConfigError, DataError, NoRowsError
from frozencore.tune.rows.conversations import RenderedRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import RawRow, Row, TokenRow, text_field, texts_field
from frozencore.tune.rows.row_sources import STANDARD_INPUT, first_rows, json_or_value, read_source, require_source

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system",
}  # fmt: skip
TOO_LONG, BEYOND = "too long", "beyond --num-evaluation"


@dataclass(frozen=True)
class EncodedSource:
    """The rows of one source, encoded.

    Attributes:
        texts: The normalised text of each row by id; rows with equal texts stay on one side of a split.
        columns: The columns of the form, such as ``("prompt", "completion")``.
        left_out: The number of rows left out, by reason.
        unused: The columns of the source that are not read.
        is_talk: Whether the rows are conversations.
    """

    source: str
    rows: list[TokenRow]
    texts: Mapping[str, str]
    columns: tuple[str, ...]
    left_out: Counter[str]
    unused: tuple[str, ...] = ()
    is_talk: bool = False

    @property
    def num_read(self) -> int:
        return len(self.rows) + sum(self.left_out.values())


def read_rows(
    data: str,
    encoder: PromptEncoder,
    columns: str | None = None,
    *,
    skip_bad: bool = False,
    prefix: str = "",
    most_rows: int | None = None,
) -> EncodedSource:
    """Read every row (:mod:`frozencore.tune.rows.row_sources`) and encode it; ids are ``row-1``, ``row-2``, ...

    Args:
        prefix: The beginning of every id.
        columns: The names of the source's columns, such as ``prompt=question,completion=answer``.
        skip_bad: Leave out and count rows with a missing or empty column, instead of raising an error.
        most_rows: Use only the first so many good rows.

    Raises:
        ConfigError: The rows are messages and the tokenizer has no chat template, or ``columns`` is malformed.
        DataError: The source is missing, empty, of another kind, or a row lacks columns or is too long; the message has
            the row number.
        NoRowsError: Every row is left out.
    """
    rows, origin = read_source(data), "The standard input" if data == STANDARD_INPUT else data
    given = list(dict.fromkeys(column for row in rows for column in row))
    named = {} if columns is None else _names(columns, rows[0], origin)
    taken = {*named, *named.values()}
    rows = [
        {name: value for name, value in row.items() if name not in taken}
        | {ours: row.get(theirs) for ours, theirs in named.items()}
        for row in rows
    ]
    form = _form_of(rows, origin)
    if form == PAIR and columns is None and any(_is_verdict(row.get("label")) for row in rows):
        raise DataError(
            f"{origin} holds good and bad answers (label: true or false), and `tune` would learn both: leave out rows "
            "with a false label, or train with TRL's KTOTrainer. If the label says something else, name the columns: "
            "--columns prompt=prompt,completion=completion."
        )
    is_pair = form == PAIR and not isinstance(rows[0].get("prompt"), list)
    beside = [] if form == TEXT or (is_pair and not encoder.is_chat) else ["system", "tools"]
    beside += ["choices"] * is_pair + ["input"] * (form == ALPACA)
    read = {named.get(column, column) for column in (*form, *beside)}
    rendered: list[RenderedRow] = []
    bad: Counter[str] = Counter()
    for number, row in enumerate(rows, start=1):
        try:
            rendered.append(encoder.render(_FORMS[form](row, f"{prefix}row-{number}")))
        except DataError as error:
            message = re.sub(r"'(\w+)'", lambda match: repr(named.get(match[1], match[1])), str(error))
            if not skip_bad:
                raise DataError(f"{message} It is in {origin}; --skip-bad leaves such rows out.") from error
            why = message.partition(": ")[2].partition(": ")[0]  # without the row, and what a template says of it
            bad[why.partition(", but")[0].rstrip(".")] += 1  # without the value
    if not rendered:
        raise NoRowsError(f"--skip-bad left none of {len(rows)} rows of {origin}: {next(iter(bad))}.")
    used = rendered[:most_rows]
    encoded = encoder.encode(used)
    return EncodedSource(
        data,
        encoded,
        {row.id: normal_form(row.context + row.completion) for row in rendered},
        form,
        bad + Counter({BEYOND: len(rendered) - len(used), TOO_LONG: len(used) - len(encoded)}),
        tuple(column for column in given if column not in read),
        not is_pair and form not in (TEXT, ALPACA),
    )


def normal_form(text: str) -> str:
    """A text with single spaces and composed characters (NFC), for finding rows with the same text."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def require_rows(data: str, columns: str | None, *, option: str = "--data") -> None:
    """Check the first rows of a source and their columns, before anything is loaded; only files are read.

    Raises:
        ConfigError, DataError: As in :func:`read_rows`.
    """
    require_source(data, option=option)
    if rows := first_rows(data):
        if columns is not None:
            _names(columns, rows[0], data)
        else:
            _form_of(rows, data)


def _is_verdict(label: Any) -> bool:
    return isinstance(label, bool) or str(label).strip().lower() in ("true", "false")


def _names(columns: str, row: RawRow, origin: str) -> dict[str, str]:
    """The source's column for each of our columns that ``columns`` maps."""
    pairs = [part.strip().partition("=") for part in columns.split(",")]
    named = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    if len(named) < len(pairs) or not named.keys() <= KNOWN or not all(named.values()):
        raise ConfigError(
            f"--columns says which column is which, as prompt=question,completion=answer, of "
            f"{', '.join(sorted(KNOWN))}, but {columns!r} was given."
        )
    if absent := [theirs for theirs in named.values() if theirs not in row]:
        raise DataError(f"{origin} has no column {absent[0]!r} (--columns); row 1 has {', '.join(row) or 'none'}.")
    return named


def _form_of(rows: Sequence[RawRow], origin: str) -> tuple[str, ...]:
    """The first form whose columns the first row has; all rows must have this form."""
    for columns in _FORMS:
        if all(column in rows[0] for column in columns):
            return columns
    if {"chosen", "rejected"} <= rows[0].keys():
        way_out = "Preferences (chosen and rejected) are learned with TRL, as examples/dpo.py does."
    else:
        lists = {column: value for column, value in rows[0].items() if isinstance(value, list)}
        talks = [
            f"messages={column}" for column, turns in lists.items() if isinstance(next(iter(turns), None), Mapping)
        ]
        way_out = f"Other names: --columns {next(iter(talks), 'prompt=NAME,completion=NAME')}."
    raise DataError(
        f"{origin} needs the columns prompt and completion, or messages, or instruction and output, or conversations, "
        f"or text, but row 1 has {', '.join(rows[0]) or 'none'}. {way_out}"
    )


def _pair(row: RawRow, row_id: str) -> Row:
    if isinstance(row.get("prompt"), list):
        asked, answer = (_turns(row, column, row_id) for column in PAIR)
        return _conversation([*asked, *answer], "completion", row, row_id, num_completion=len(answer))
    prompt, completion = (_text(row, column, row_id) for column in PAIR)
    choices = tuple(texts_field(row, "choices", row_id)) if _is_given(row, "choices") else ()
    return Row(row_id, prompt, completion, choices, system=_system(row, row_id), tools=_tools(row, row_id))


def _instruction(row: RawRow, row_id: str) -> Row:
    given = [column for column in ("instruction", "input") if _is_given(row, column)] or ["instruction"]
    asked = "\n\n".join(_text(row, column, row_id) for column in given)
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(row, "output", row_id)}]
    return _conversation(turns, "output", row, row_id)


def _talk(row: RawRow, row_id: str, *, column: str) -> Row:
    given = row.get(column)
    first = given[0] if isinstance(given, list) and given else None
    if not isinstance(first, Mapping) or first.get("from") is None:
        return _conversation(_turns(row, column, row_id), column, row, row_id)
    turns = []
    for turn in _turns(row, column, row_id, role="from"):
        if turn["from"].strip().lower() not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise DataError(
                f"Row {row_id}: a turn of {column!r} is from {known}, not from {turn['from']!r:.60}. Give tool calls "
                "as `tool_calls` of a turn with role and content, and their results with the role tool."
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turns.append({**rest, "role": turn["from"], "content": _text(turn, "value", row_id)})
    return _conversation(turns, column, row, row_id)


def _text(row: RawRow, column: str, row_id: str) -> str:
    """The text in a column with its white space."""
    text_field(row, column, row_id)
    text: str = row[column]
    return text


def _turns(row: RawRow, column: str, row_id: str, role: str = "role") -> list[dict[str, Any]]:
    turns = row.get(column)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"Row {row_id}: column {column!r} must hold a list of turns, each with a {role} and a content.")
    for turn in turns:
        text_field(turn, role, row_id)
    return [dict(turn) for turn in turns]


def _conversation(
    turns: list[dict[str, Any]], column: str, row: RawRow, row_id: str, *, num_completion: int = 1
) -> Row:
    turns = [{**turn, "role": SHAREGPT_ROLES.get(turn["role"].strip().lower(), turn["role"])} for turn in turns]
    for turn in turns:
        if isinstance(parts := turn.get("content"), list) and parts:
            turn["content"] = "".join(_text_of_part(part, row_id) for part in parts)
        if turn.get("content") != "" and (turn.get("content") is not None or not turn.get("tool_calls")):
            text_field(turn, "content", row_id)
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise DataError(
            f"Row {row_id}: {column!r} must end with the assistant's turn after another one: it is the label."
        )
    if not turns[-1].get("tool_calls"):
        text_field(turns[-1], "content", row_id)
    if system := _system(row, row_id):
        first = {"role": "system", "content": system}
        if turns[0]["role"] == "system" and turns[0]["content"] != system:
            raise DataError(f"Row {row_id}: column 'system' and the first turn must be the same, but they differ.")
        turns = [first, *(turns[1:] if turns[0]["role"] == "system" else turns)]
    return Row(row_id, messages=tuple(turns), num_completion=num_completion, tools=_tools(row, row_id))


def _text_of_part(part: Any, row_id: str) -> str:
    """The text of a part of a content; templates write the texts of parts without anything between them."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise DataError(
            f"Row {row_id}: column 'content' must hold text, but holds a part of type {kind!r:.60}. `tune` reads text "
            "only; examples/vision.py trains on images."
        )
    return _text(part, "text", row_id)


def _system(row: RawRow, row_id: str) -> str:
    return _text(row, "system", row_id) if _is_given(row, "system") else ""


def _is_given(row: RawRow, column: str) -> bool:
    """Whether a column has a value: not null, white space, or the NaN of an empty cell of a table."""
    value = row.get(column)
    return value is not None and value == value and (not isinstance(value, str) or bool(value.strip()))


def _tools(row: RawRow, row_id: str) -> list[Any] | None:
    """The column's list; some data sets store it as JSON text."""
    given = row["tools"] if _is_given(row, "tools") else []
    return json_or_value(given, list, f"Row {row_id}: column 'tools' must hold a list of tools") or None


PAIR, ALPACA, TEXT = ("prompt", "completion"), ("instruction", "output"), ("text",)
_FORMS: dict[tuple[str, ...], Callable[[RawRow, str], Row]] = {
    PAIR: _pair,
    ("messages",): partial(_talk, column="messages"),
    ALPACA: _instruction,
    ("conversations",): partial(_talk, column="conversations"),
    TEXT: lambda row, row_id: Row(row_id, completion=_text(row, "text", row_id)),
}
KNOWN = {column for columns in _FORMS for column in columns} | {"input", "choices", "system", "tools"}
