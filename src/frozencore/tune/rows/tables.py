"""Tables as rows: CSV, TSV, Parquet and Arrow, and compressed files. They keep the text of each value.

``datasets`` would read ``007`` as 7, ``NA`` as nothing, and dates as such.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow
from pyarrow import ipc, parquet

from frozencore.tune.rows.row import RawRow, require_once


def decompressed(path: Path, compression: str) -> IO[bytes]:
    """The content of a compressed file."""
    stream: IO[bytes] = pyarrow.input_stream(str(path), compression=compression)
    return stream


def _read_separated(content: IO[bytes], *, separator: str) -> list[RawRow]:
    """Read a table as text; where commas are for decimals, spreadsheets separate the cells of a CSV by semicolons."""
    text = content.read().decode("utf-8-sig")
    header = text.lstrip().partition("\n")[0]
    if ";" in header and separator not in header:
        separator = ";"
    lines = iter(_cells(text, separator, is_quoted=not (separator == "\t" and _is_plain(text))))
    names = [name.strip() for name in next((cells for _, cells in lines if any(map(str.strip, cells))), [])]
    width, rows = len(names), []
    for number, cells in lines:
        if len(cells) > width:
            raise ValueError(f"line {number} has {len(cells)} cells, but the header {width}.")
        rows.append([*cells, *[""] * (width - len(cells))])
    while names and not names[-1] and not any(row[len(names) - 1].strip() for row in rows):
        names.pop()  # separators at the end of the line, as spreadsheets write them
    require_once(names, "column")
    return [dict(zip(names, row, strict=False)) for row in rows]


def _cells(text: str, separator: str, *, is_quoted: bool) -> list[tuple[int, list[str]]]:
    """The cells of each line that is not empty, with its number.

    A quote that ends no cell is refused: Spark and MySQL write ``\\"`` inside of cells, and a lenient reader would keep
    the backslash and move the quotes.
    """
    longest = csv.field_size_limit(len(text) + 1)
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        quoting=csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        lines = ((reader.line_num, cells) for cells in reader)
        return [(number, cells) for number, cells in lines if cells and not (len(cells) == 1 and cells[0].isspace())]
    except csv.Error as error:
        way_out = "Inside of a quoted cell a quote is written twice."
        raise ValueError(f"line {reader.line_num}: {error}. {way_out}") from error
    finally:
        csv.field_size_limit(longest)


def _is_plain(text: str) -> bool:
    """Return whether a quote in tab-separated text is a letter: each line has all columns, and quotes would join some.

    Such files have no quoting; those of spreadsheets have quotes around a cell with a tab, a line end or a quote.
    """
    if '"' not in text:  # most files: quoting changes nothing
        return False
    lines = [line for line in text.split("\n") if line.strip()]
    counts = {line.count("\t") for line in lines}
    if len(counts) != 1 or counts == {0}:
        return False
    try:
        return len(list(csv.reader(lines, delimiter="\t", strict=True))) != len(lines)
    except csv.Error as error:
        return any(part in str(error) for part in ("unexpected end", "expected after"))  # of a quote that stands alone


def _read_parquet(content: IO[bytes]) -> Iterable[RawRow]:
    return rows_of_arrow(parquet.read_table(pyarrow.BufferReader(content.read())))


def _read_arrow(content: IO[bytes]) -> Iterable[RawRow]:
    """Read Arrow as a file, or as the stream that ``datasets`` writes."""
    whole = content.read()
    return rows_of_arrow((ipc.open_file(whole) if whole.startswith(b"ARROW1") else ipc.open_stream(whole)).read_all())


def rows_of_arrow(table: Any) -> Iterable[RawRow]:
    """The rows of an Arrow table, without keys that are null inside its columns.

    Arrow gives each object of a column the keys of all others, with null in them, and a template would write these. A
    null that the row itself has looks the same and is removed too, as with TRL's ``remove_none_values``. A column of
    JSON keeps its nulls.
    """
    require_once(table.column_names, "column")
    read = {column.name: _reader_of(column.type) for column in table.schema}
    rows = table.to_pylist(maps_as_pydicts="strict")
    return ({name: None if value is None else read[name](value) for name, value in row.items()} for row in rows)


def _reader_of(kind: Any) -> Callable[[Any], Any]:
    """A function of the values of an Arrow type that reads JSON, and leaves out the keys of objects that are null."""
    if isinstance(kind, pyarrow.JsonType):
        return json.loads
    if isinstance(kind, pyarrow.StructType):
        parts = {field.name: _reader_of(field.type) for field in kind}
        return lambda value: {key: parts[key](item) for key, item in value.items() if item is not None}
    if isinstance(kind, pyarrow.MapType):
        of_item = _reader_of(kind.item_type)
        return lambda value: {key: of_item(item) for key, item in value.items() if item is not None}
    if pyarrow.types.is_nested(kind) and hasattr(kind, "value_type"):
        of_value = _reader_of(kind.value_type)
        return lambda value: [None if item is None else of_value(item) for item in value]
    return lambda value: value


READERS: dict[str, Callable[[IO[bytes]], Iterable[RawRow]]] = {
    ".csv": partial(_read_separated, separator=","),
    ".tsv": partial(_read_separated, separator="\t"),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""The readers of tables, by the ending of a file."""
