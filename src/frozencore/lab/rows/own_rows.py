"""The user's own training rows, from JSONL or Parquet.

    {"prompt": "Capital of France?", "completion": " Paris"}
    {"messages": [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "Paris"}]}
    {"text": "Paris is the capital of France."}

The loss is on the completion, on the assistant's last turn, or on the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from frozencore.errors import DataError
from frozencore.lab.rows.prompts import PromptEncoder, TextRow
from frozencore.lab.tasks.fields import text_field
from frozencore.lab.tasks.task import Example
from frozencore.one_line import one_line

Row = Mapping[str, Any]


def read_rows(path: Path, encoder: PromptEncoder) -> list[TextRow]:
    """Read every row of a ``.jsonl`` or ``.parquet`` file and render it; ids are ``row-1``, ``row-2``, ...

    Raises:
        ConfigError: The rows are messages and the tokenizer has no chat template.
        DataError: The file is absent, empty, of another kind, or a row lacks its columns; with the row number.
    """
    return render_rows(read_file(path, option="--data"), str(path), encoder)


def render_rows(rows: Sequence[Row], origin: str, encoder: PromptEncoder) -> list[TextRow]:
    """As :func:`read_rows`, of rows that are at hand.

    Args:
        origin: What an error calls them.
    """
    if not rows:
        raise DataError(f"{origin} holds no rows. Give at least one.")
    render = _renderer(rows[0], origin)
    return [render(row, f"row-{number}", encoder) for number, row in enumerate(rows, start=1)]


def read_file(path: Path, *, option: str) -> list[Row]:
    """Every row of a ``.jsonl`` or ``.parquet`` file as it is; ``option`` is what an error says to correct.

    Raises:
        DataError: The file is absent, empty, damaged, or of another kind.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{option} must name a .jsonl or .parquet file, but there is no file {path}.")
    if path.suffix not in _READERS:
        raise DataError(f"{option} must name a .jsonl or .parquet file, got {path.name!r}. Convert it to one of these.")
    rows = list(_READERS[path.suffix](path))
    if not rows:
        raise DataError(f"{path} holds no rows. Give a file with at least one.")
    return rows


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, number, path)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} must be UTF-8 text, but is not: {error}. Save it as UTF-8.") from error


def _parse_line(line: str, number: int, path: Path) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}, line {number}: each line must be a JSON object, but this is none: {error}."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: each line must be a JSON object, got {line.strip()[:60]!r}.")
    return row


def _read_parquet(path: Path) -> Sequence[Row]:
    from pyarrow import ArrowException, parquet

    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError, ValueError) as error:  # Thrift's are OSError, text that is no UTF-8 a ValueError
        reason = one_line(error, 200)
        raise DataError(f"{path} cannot be read as Parquet: {reason} Write it again.") from error
    return rows


_READERS: dict[str, Callable[[Path], Iterator[Row] | Sequence[Row]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _renderer(first: Row, origin: str) -> Callable[[Row, str, PromptEncoder], TextRow]:
    for columns, render in _FORMATS.items():
        if all(column in first for column in columns):
            return render
    raise DataError(
        f"{origin} needs the columns prompt and completion, or messages, or text, "
        f"but row 1 has {', '.join(first) or 'none'}."
    )


def _render_pair(row: Row, row_id: str, encoder: PromptEncoder) -> TextRow:
    text_field(row, "prompt", row_id)
    text_field(row, "completion", row_id)
    return encoder.render(Example(row_id, row["prompt"], row["completion"]))


def _render_messages(row: Row, row_id: str, encoder: PromptEncoder) -> TextRow:
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"Row {row_id}: column 'messages' must hold a list of turns, each with a role and a content.")
    for message in messages:
        text_field(message, "role", row_id)
        text_field(message, "content", row_id)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DataError(
            f"Row {row_id}: 'messages' must end with the assistant's turn after another one: it is the label."
        )
    return encoder.render_messages(messages, row_id)


def _render_text(row: Row, row_id: str, encoder: PromptEncoder) -> TextRow:
    text_field(row, "text", row_id)
    return TextRow(row_id, context="", completion=row["text"])


_FORMATS: dict[tuple[str, ...], Callable[[Row, str, PromptEncoder], TextRow]] = {
    ("prompt", "completion"): _render_pair,
    ("messages",): _render_messages,
    ("text",): _render_text,
}
