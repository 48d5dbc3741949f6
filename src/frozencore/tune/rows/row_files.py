"""Read rows from a file: JSONL, JSON, CSV, TSV, Parquet or Arrow, by its ending."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.rows import Row
from frozencore.words import one_line


def read_file(path: Path, *, option: str) -> list[Row]:
    """Read every row of a file; errors name ``option``.

    Raises:
        DataError: The file is missing, empty, damaged, or of another kind.
    """
    require_file(path, option=option)
    try:
        rows = list(READERS[path.suffix](path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8 text, but is not: {error}. Save it as UTF-8.") from error
    if not rows:
        raise DataError(f"{path} holds no rows. Give a file with at least one.")
    return rows


def require_file(path: Path, *, option: str) -> None:
    """Raise a ``DataError`` for a missing file or one of another kind."""
    if not path.is_file():
        raise DataError(f"{option} must name {KINDS}, but there is no file {path}.")
    if path.suffix not in READERS:
        raise DataError(f"{option} must name {KINDS}, got {path.name!r}. Convert it to one of these.")


def parse_jsonl(lines: Iterable[str], origin: str) -> Iterator[Row]:
    """Yield a row from each line that is not empty.

    Raises:
        DataError: A line is not a JSON object; the message has its number and ``origin``, the source of the lines.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        rule = f"{origin}, line {number}: each line must be a JSON object,"
        try:
            row = strict_json(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{rule} but this is none: {error}.") from error
        if not isinstance(row, dict):
            raise DataError(f"{rule} got {line.strip()[:60]!r}.")
        yield row


def strict_json(text: str) -> Any:
    """Parse JSON; raise a ``ValueError`` for a key that an object has twice: one of its values would be lost."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        require_once((key for key, _ in pairs), "key")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def require_once(names: Iterable[str], kind: str) -> None:
    """Raise a ``ValueError`` for a name that comes twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"the {kind} {twice[0]!r} is given twice")


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        yield from parse_jsonl(lines, str(path))


def _read_json(path: Path) -> Sequence[Row]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} must be one JSON list of objects, but is none: {one_line(error)}.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} must be one JSON list of objects. A file with an object a line ends in .jsonl.")
    return rows


def _read_separated(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            require_once(reader.fieldnames or (), "column")
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, line {reader.line_num}: a row must have the {len(reader.fieldnames or ())} columns "
                        "of the first line. Quote what holds a separator or a new line."
                    )
                yield row
        except (csv.Error, ValueError) as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}. Write it again.") from error


def _read_arrow(path: Path) -> Sequence[Row]:
    """Read Parquet, or Arrow as a file or as the stream that ``datasets`` writes."""
    from pyarrow import ArrowException, ipc, parquet

    try:
        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        else:
            content = path.read_bytes()
            opened = ipc.open_file(content) if content.startswith(b"ARROW1") else ipc.open_stream(content)
            table = opened.read_all()
        require_once(table.column_names, "column")
        rows = [without_fillers(row) for row in table.to_pylist()]
    except (ArrowException, OSError, ValueError) as error:  # OSError from Thrift, ValueError from invalid UTF-8
        kind = path.suffix[1:].capitalize()
        raise DataError(f"{path} cannot be read as {kind}: {one_line(error, 200)} Write it again.") from error
    return rows


def without_fillers(row: Row) -> Row:
    """A row of Arrow without keys that are null inside its columns.

    Arrow gives each object of a column the keys of all others, with null in them, and a template would write these. A
    null of the row's own looks the same, so it goes too, as with TRL's ``remove_none_values``.
    """

    def told(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: told(item) for key, item in value.items() if item is not None}
        return [told(item) for item in value] if isinstance(value, list) else value

    return {column: told(value) for column, value in row.items()}


READERS: dict[str, Callable[[Path], Iterator[Row] | Sequence[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_separated,
    ".tsv": _read_separated,
    ".parquet": _read_arrow,
    ".arrow": _read_arrow,
}
"""The readers of files, by ending."""
KINDS = f"a {', '.join([*READERS][:-1])} or {[*READERS][-1]} file"
