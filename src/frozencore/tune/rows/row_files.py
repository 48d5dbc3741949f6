"""Rows from a file, each a table of columns: JSONL, JSON, CSV, TSV, Parquet or Arrow, told by its ending."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from frozencore.errors import DataError
from frozencore.words import one_line

Row = Mapping[str, Any]


def read_file(path: Path, *, option: str) -> list[Row]:
    """Every row of a file as it is; ``option`` is what an error says to correct.

    Raises:
        DataError: The file is absent, empty, damaged, or of another kind.
    """
    path = Path(path)
    require_file(path, option=option)
    try:
        rows = list(READERS[path.suffix](path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8 text, but is not: {error}. Save it as UTF-8.") from error
    if not rows:
        raise DataError(f"{path} holds no rows. Give a file with at least one.")
    return rows


def require_file(path: Path, *, option: str) -> None:
    """Refuse what is no file of these kinds.

    Raises:
        DataError: The file is absent, or of another kind.
    """
    if not path.is_file():
        raise DataError(f"{option} must name {KINDS}, but there is no file {path}.")
    if path.suffix not in READERS:
        raise DataError(f"{option} must name {KINDS}, got {path.name!r}. Convert it to one of these.")


def parse_jsonl(lines: Iterable[str], origin: str) -> Iterator[Row]:
    """A row from each line that is not empty.

    Raises:
        DataError: A line is no JSON object, with its number; ``origin`` is what it is of.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parse_line(line, number, origin)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        yield from parse_jsonl(lines, str(path))


def _parse_line(line: str, number: int, origin: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{origin}, line {number}: each line must be a JSON object, but this is none: {error}."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{origin}, line {number}: each line must be a JSON object, got {line.strip()[:60]!r}.")
    return row


def _read_json(path: Path) -> Sequence[Row]:
    text = path.read_text(encoding="utf-8")
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} must be one JSON list of objects, but is none: {one_line(error)}.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} must be one JSON list of objects. A file with an object a line ends in .jsonl.")
    return rows


def _read_separated(path: Path, separator: str) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter=separator, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}, line {reader.line_num}: a row must have the {len(reader.fieldnames or ())} columns "
                        "of the first line. Quote what holds a separator or a new line."
                    )
                yield row
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}. Write it again.") from error


def _read_parquet(path: Path) -> Sequence[Row]:
    from pyarrow import ArrowException, parquet

    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError, ValueError) as error:  # Thrift's are OSError, text that is no UTF-8 a ValueError
        raise DataError(f"{path} cannot be read as Parquet: {one_line(error, 200)} Write it again.") from error
    return rows


def _read_arrow(path: Path) -> Sequence[Row]:
    """A file, or a stream as ``datasets`` writes it."""
    from pyarrow import ArrowException, ipc

    content = path.read_bytes()
    try:
        opened = ipc.open_file(content) if content.startswith(b"ARROW1") else ipc.open_stream(content)
        rows: list[Row] = opened.read_all().to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as Arrow: {one_line(error, 200)} Write it again.") from error
    return rows


READERS: dict[str, Callable[[Path], Iterator[Row] | Sequence[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": lambda path: _read_separated(path, ","),
    ".tsv": lambda path: _read_separated(path, "\t"),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""How to read a file, by its ending."""
KINDS = f"a {', '.join([*READERS][:-1])} or {[*READERS][-1]} file"
