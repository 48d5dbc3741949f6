"""The user's own training rows, in the usual forms of trainers.

    {"prompt": "Capital of France?", "completion": " Paris"}
    {"prompt": [{"role": "user", "content": "Capital of France?"}], "completion": [{"role": "assistant", ...}]}
    {"messages": [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "Paris"}]}
    {"instruction": "Name the capital.", "input": "France", "output": "Paris"}            (Alpaca)
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}   (ShareGPT)
    {"text": "Paris is the capital of France."}

The loss is on the completion (the assistant's turns of it), the output, the assistant's last turn, or the whole text.
Turns may call tools, listed in the column ``tools``; the ``content`` of such a turn may be null. The column ``system``
holds the first message of a conversation, and ``history`` pairs of a question and an answer before the last question.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frozencore.errors import ConfigError, DataError, NoRowsError
from frozencore.tune.rows import Example, Row, TextRow, text_field
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row_sources import STANDARD_INPUT, first_rows, json_or_value, read_source, require_source

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system",
}  # fmt: skip
ALPACA = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
ALPACA_WITHOUT_INPUT = "### Instruction:\n{instruction}\n\n### Response:\n"


@dataclass(frozen=True)
class OwnRows:
    """Rows as read from a source.

    Attributes:
        columns: The columns of the form, such as ``("prompt", "completion")``.
        left_out: The number of rows left out, by reason.
        unused: The columns of the source that are not read.
        is_talk: Whether the rows are conversations.
    """

    source: str
    texts: Sequence[TextRow]
    columns: tuple[str, ...]
    left_out: Mapping[str, int]
    unused: tuple[str, ...] = ()
    is_talk: bool = False

    @property
    def num_read(self) -> int:
        return len(self.texts) + sum(self.left_out.values())

    def only(self, texts: Sequence[TextRow], why: str) -> OwnRows:
        """These of the rows; the others are left out for this reason."""
        return replace(self, texts=texts, left_out={**self.left_out, why: len(self.texts) - len(texts)})


def read_rows(
    data: str, encoder: PromptEncoder, columns: str | None = None, *, skip_bad: bool = False, prefix: str = ""
) -> OwnRows:
    """Read every row (:mod:`frozencore.tune.rows.row_sources`) and render it; ids are ``row-1``, ``row-2``, ...

    Args:
        prefix: The beginning of every id.
        columns: The names of the source's columns, such as ``prompt=question,completion=answer``.
        skip_bad: Leave out and count rows with a missing or empty column, instead of raising an error.

    Raises:
        ConfigError: The rows are messages and the tokenizer has no chat template, or ``columns`` is malformed.
        DataError: The source is missing, empty, of another kind, or a row lacks columns; the message has the row
            number.
    """
    rows, origin = read_source(data), "The standard input" if data == STANDARD_INPUT else data
    given = list(dict.fromkeys(column for row in rows for column in row))
    named = {} if columns is None else _names(columns, rows[0], origin)
    taken = {*named, *named.values()}
    rows = [
        {name: value for name, value in row.items() if name not in taken}
        | {ours: row.get(own) for ours, own in named.items()}
        for row in rows
    ]
    form = _form_of(rows, origin)
    if form == PAIR and columns is None and any(_is_verdict(row.get("label")) for row in rows):
        raise DataError(
            f"{origin} holds good and bad answers (label: true or false), and `tune` would learn both: leave out rows "
            "with a false label, or train with TRL's KTOTrainer. If the label says something else, name the columns: "
            "--columns prompt=prompt,completion=completion."
        )
    is_talk = form in (("messages",), ("conversations",)) or isinstance(rows[0].get("prompt"), list)
    beside = _BESIDE if is_talk or (encoder.is_chat and form != ("text",)) else ()  # the columns that are read too
    if form == ALPACA_FORM:
        beside = ("input", *(_BESIDE if encoder.is_chat else ("system", "history")))
    used = {named.get(column, column) for column in (*form, *beside)}
    texts: list[TextRow] = []
    bad: Counter[str] = Counter()
    for number, row in enumerate(rows, start=1):
        try:
            texts.append(_FORMS[form](row, f"{prefix}row-{number}", encoder))
        except DataError as error:
            said = re.sub(r"'(\w+)'", lambda found: repr(named.get(found[1], found[1])), str(error))
            if not skip_bad:
                raise DataError(said) from error
            why = said.partition(": ")[2].partition(": ")[0]  # without the row, and what a template says of it
            bad[why.partition(", but")[0].rstrip(".")] += 1  # without the value
    if not texts:
        raise NoRowsError(f"--skip-bad left none of {len(rows)} rows of {origin}: {next(iter(bad))}.")
    return OwnRows(data, texts, form, bad, tuple(column for column in given if column not in used), is_talk)


def require_rows(data: str, columns: str | None = None, *, option: str = "--data") -> None:
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


def _names(columns: str, row: Row, origin: str) -> dict[str, str]:
    """The source's name of each of our columns that ``columns`` names."""
    pairs = [part.strip().partition("=") for part in columns.split(",")]
    theirs = {ours.strip(): own.strip() for ours, _, own in pairs}
    if len(theirs) < len(pairs) or not theirs.keys() <= KNOWN or not all(theirs.values()):
        raise ConfigError(
            f"--columns says which column is which, as prompt=question,completion=answer, of "
            f"{', '.join(sorted(KNOWN))}, but {columns!r} came."
        )
    if absent := [own for own in theirs.values() if own not in row]:
        raise DataError(f"{origin} has no column {absent[0]!r} (--columns); row 1 has {', '.join(row) or 'none'}.")
    return theirs


def _form_of(rows: Sequence[Row], origin: str) -> tuple[str, ...]:
    """The first form whose columns the first row has; all rows must have this form."""
    for columns in _FORMS:
        if all(column in rows[0] for column in columns):
            return columns
    if {"chosen", "rejected"} <= rows[0].keys():
        raise DataError(
            f"{origin} holds preferences (chosen and rejected), which `tune` does not learn: train a core on them with "
            "TRL, as examples/dpo.py does."
        )
    raise DataError(
        f"{origin} needs the columns prompt and completion, or messages, or instruction and output, or conversations, "
        f"or text, but row 1 has {', '.join(rows[0]) or 'none'}. Other names: --columns prompt=NAME,completion=NAME."
    )


def _render_pair(row: Row, row_id: str, encoder: PromptEncoder) -> TextRow:
    if isinstance(row.get("prompt"), list):
        prompt, completion = (_turns(row, column, row_id) for column in PAIR)
        turns = [*prompt, *completion]
        return _render_turns(turns, "completion", row, row_id, encoder, num_completion=len(completion))
    asked, answer = (_text(row, column, row_id) for column in PAIR)
    before, tools = (_before(row, row_id), _tools(row, row_id)) if encoder.is_chat else ([], None)
    return encoder.render(Example(row_id, asked, answer), before, tools)


def _render_instruction(row: Row, row_id: str, encoder: PromptEncoder) -> TextRow:
    """Render an instruction: as a user's turn for a chat model, else with Alpaca's headings."""
    instruction, output = (_text(row, column, row_id) for column in ALPACA_FORM)
    further = _text(row, "input", row_id) if _is_given(row, "input") else ""
    before = _before(row, row_id)
    if encoder.is_chat:
        asked = {"role": "user", "content": "\n\n".join(filter(None, (instruction, further)))}
        answered = {"role": "assistant", "content": output}
        return encoder.render_messages([*before, asked, answered], row_id, _tools(row, row_id))
    headings = {"system": "{}\n\n", "user": ALPACA_WITHOUT_INPUT, "assistant": "{}\n\n"}
    said = "".join(headings[turn["role"]].replace("{instruction}", "{}").format(turn["content"]) for turn in before)
    prompt = (ALPACA if further else ALPACA_WITHOUT_INPUT).format(instruction=instruction, input=further)
    return encoder.render(Example(row_id, said + prompt, output))


def _render_conversation(row: Row, row_id: str, encoder: PromptEncoder) -> TextRow:
    turns = []
    for turn in _turns(row, "conversations", row_id, role="from"):
        if turn["from"] not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise DataError(f"Row {row_id}: a turn of 'conversations' is from {known}, but {turn['from']!r:.60} came.")
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turns.append({**rest, "role": SHAREGPT_ROLES[turn["from"]], "content": _text(turn, "value", row_id)})
    return _render_turns(turns, "conversations", row, row_id, encoder)


def _text(row: Row, column: str, row_id: str) -> str:
    """The text in a column with its white space."""
    text_field(row, column, row_id)
    text: str = row[column]
    return text


def _turns(row: Row, column: str, row_id: str, role: str = "role") -> list[dict[str, Any]]:
    turns = row.get(column)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"Row {row_id}: column {column!r} must hold a list of turns, each with a {role} and a content.")
    for turn in turns:
        text_field(turn, role, row_id)
    return [dict(turn) for turn in turns]


def _render_turns(
    turns: list[dict[str, Any]], column: str, row: Row, row_id: str, encoder: PromptEncoder, *, num_completion: int = 1
) -> TextRow:
    for turn in turns:
        if turn.get("content") != "" and (turn.get("content") is not None or not turn.get("tool_calls")):
            text_field(turn, "content", row_id)
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise DataError(
            f"Row {row_id}: {column!r} must end with the assistant's turn after another one: it is the label."
        )
    if not turns[-1].get("tool_calls"):
        text_field(turns[-1], "content", row_id)
    before = _before(row, row_id)
    if before and turns[0]["role"] == "system":
        if before[0]["role"] == "system" and before[0]["content"] != turns[0]["content"]:
            raise DataError(f"Row {row_id}: column 'system' and the first turn must be the same, but they differ.")
        before, turns = [turns[0], *(turn for turn in before if turn["role"] != "system")], turns[1:]
    return encoder.render_messages([*before, *turns], row_id, _tools(row, row_id), num_completion=num_completion)


def _before(row: Row, row_id: str) -> list[dict[str, Any]]:
    """The messages of the columns ``system`` and ``history``."""
    found = []
    if _is_given(row, "system"):
        found.append({"role": "system", "content": _text(row, "system", row_id)})
    pairs = row["history"] if _is_given(row, "history") else []
    for pair in pairs if isinstance(pairs, list | tuple) else [None]:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"Row {row_id}: column 'history' must hold pairs of a question and an answer.")
        found += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    return found


def _is_given(row: Row, column: str) -> bool:
    """Whether a column holds more than nothing: null, white space, or the NaN of a table's empty cell."""
    value = row.get(column)
    return value is not None and value == value and (not isinstance(value, str) or bool(value.strip()))


def _tools(row: Row, row_id: str) -> list[Any] | None:
    """The column's list; some data sets store it as JSON text."""
    given = row["tools"] if _is_given(row, "tools") else []
    return json_or_value(given, list, f"Row {row_id}: column 'tools' must hold a list of tools") or None


PAIR, ALPACA_FORM = ("prompt", "completion"), ("instruction", "output")
_BESIDE = ("system", "history", "tools")
_FORMS: dict[tuple[str, ...], Callable[[Row, str, PromptEncoder], TextRow]] = {
    PAIR: _render_pair,
    ("messages",): lambda row, row_id, encoder: _render_turns(
        _turns(row, "messages", row_id), "messages", row, row_id, encoder
    ),
    ALPACA_FORM: _render_instruction,
    ("conversations",): _render_conversation,
    ("text",): lambda row, row_id, encoder: encoder.plain(row_id, _text(row, "text", row_id)),
}
KNOWN = {column for columns in _FORMS for column in columns} | {"input", *_BESIDE}
