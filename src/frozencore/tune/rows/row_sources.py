"""Read rows from a file, the standard input, or a split of a data set on the hub or in a folder."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from frozencore.errors import ConfigError, DataError
from frozencore.text import nearest_name, one_line
from frozencore.tune.rows.row import RawRow, require_once

Data = str | tuple[str, ...]
"""One source, or several."""
STANDARD_INPUT = "-"
_SPLIT = re.compile(r"(?P<name>[^:]+)(:(?P<config>[^:\[\]]+))?:(?P<split>\w[\w.-]*(\[[^\]]*\])?)")


def in_words(data: Data | None) -> str:
    """The sources as given."""
    return data if isinstance(data, str) else " and ".join(data or ())


def sources_of(data: Data) -> tuple[str, ...]:
    """The sources that ``--data`` names.

    Raises:
        ConfigError: A source is named twice.
    """
    names = (data,) if isinstance(data, str) else data
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"Each --data is another source, but {', '.join(sorted(twice))} comes twice. Leave one out.")
    return names


def named(data: str) -> str:
    """The name of a source on a model card; for a path only its last part, to keep the folder private."""
    if data == STANDARD_INPUT:
        return "standard input"
    place, split = data, ""
    if not Path(data).exists() and (match := _SPLIT.fullmatch(data)) is not None:
        place, split = match["name"], data.removeprefix(match["name"])
    return Path(place).name + split if Path(place).exists() else data


def require_source(data: str, *, option: str = "--data") -> None:
    """Check that a source exists and has a known kind, without reading a row; errors name ``option``.

    Raises:
        DataError: As in :func:`read_source`.
    """
    path = Path(data)
    if data == STANDARD_INPUT or (not path.is_file() and _SPLIT.fullmatch(data)):
        return
    if not path.exists():
        near = nearest_name(
            path.name, [other.name for other in path.parent.glob("*") if row_file(other.name) and other.exists()]
        )
        guess = f" Did you mean {path.with_name(near)}?" if near else f" {option} takes {KINDS}."
        guess = " Repeat --data for each file." if "*" in path.name else guess
        raise DataError(f"{option}: there is no file {path}.{guess}")
    if path.is_dir() or row_file(path.name) is None:
        way_out = f"Name a split of its data set, as {data}:train" if path.is_dir() else "Convert it to one of these"
        raise DataError(f"{option} must name {KINDS}, but {path.name!r} was given. {way_out}.")


def read_source(data: str, *, option: str = "--data") -> list[RawRow]:
    """Read every row of a source.

    Args:
        data: A file; ``-`` for JSONL on the standard input; or a split of a data set, ``NAME:SPLIT`` or
            ``NAME:CONFIGURATION:SPLIT``, where the name is a hub id or a folder. A split may be sliced as in
            ``datasets``: ``train[:1000]``.
        option: The option that errors name.

    Raises:
        DataError: The source is missing, empty, damaged or of another kind.
        ConfigError: The standard input is a terminal, or closed.
    """
    require_source(data, option=option)
    origin, path = "The standard input" if data == STANDARD_INPUT else data, Path(data)
    if data != STANDARD_INPUT and not path.is_file() and (match := _SPLIT.fullmatch(data)) is not None:
        from frozencore.tune.rows.dataset_splits import read_split  # the import takes two seconds

        return read_split(match["name"], match["config"], match["split"])
    if data == STANDARD_INPUT and (sys.stdin is None or sys.stdin.isatty()):
        kind = "closed" if sys.stdin is None else "a terminal"
        raise ConfigError(f"--data - reads JSONL from a pipe or a file, but the standard input is {kind}.")
    return rows_of_file(path, origin)


def first_rows(data: str, num_rows: int = 100) -> list[RawRow]:
    """The first rows of a file, to see their columns; none of other sources, which cannot be read twice or at once.

    Raises:
        DataError: The file is empty or damaged.
    """
    return rows_of_file(Path(data), data, num_rows) if Path(data).is_file() else []


def rows_of_file(path: Path, origin: str, num_rows: int | None = None) -> list[RawRow]:
    """The rows of a file, or the first so many; ``origin`` names it in errors.

    Raises:
        DataError: The file is empty or damaged.
    """
    name = row_file(path.name)
    try:
        if name is None:
            rows = list(_read_jsonl(io.BytesIO(_all_of(sys.stdin.buffer))))
        else:
            with _opened(path, name.compression) as content:
                rows = list(islice(READERS[name.ending](content), num_rows))
    except (ValueError, TypeError, NotImplementedError, RecursionError, OSError) as error:  # Arrow's errors among them
        if isinstance(error, OSError) and error.errno is not None:  # of the system; others are of damaged content
            raise
        kind = "JSONL" if name is None else name.ending.removeprefix(".").upper()
        encoded = ". Write it in UTF-8: `iconv -f ENCODING -t UTF-8`" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"{origin} cannot be read as {kind} in UTF-8: {one_line(error, 200)}{encoded}") from error
    if not rows:
        raise DataError(f"{origin} holds no rows. Give at least one.")
    return rows


@lru_cache(maxsize=1)
def _all_of(stream: IO[bytes]) -> bytes:
    """The content of a stream that can be read once, however often it is asked for."""
    return stream.read()


def _opened(path: Path, compression: str | None) -> IO[bytes]:
    content: IO[bytes] = path.open("rb") if compression is None else _tables().decompressed(path, compression)
    return content


def _read_jsonl(content: IO[bytes]) -> Iterator[RawRow]:
    for number, line in enumerate(io.TextIOWrapper(content, encoding="utf-8-sig"), start=1):
        if line.strip():
            yield _object(line, f"line {number}")


def _object(given: Any, place: str) -> RawRow:
    """A JSON object, parsed first if it is text; a ``ValueError`` names its place."""
    try:
        value, reason = strict_json(given) if isinstance(given, str) else given, ""
    except (ValueError, RecursionError) as error:
        value, reason = None, f" ({error})"
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be a JSON object, but is {str(given).strip()[:60]!r}{reason}.")
    return value


def strict_json(text: str) -> Any:
    """Parse JSON; raise a ``ValueError`` for a key that an object has twice: one of its values would be lost."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        require_once((key for key, _ in pairs), "key")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def json_or_value(given: Any, kind: type[Any], rule: str) -> Any:
    """A value, parsed first if it is JSON text; ``DataError`` with the rule if it is not of this kind."""
    try:
        value = strict_json(given) if isinstance(given, str) else given
        json.dumps(value, allow_nan=False, default=str)  # a template would write NaN, which JSON has not
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise DataError(f"{rule}, or that as JSON, but {given!r:.60} was given.")
    return value


def _read_json(content: IO[bytes]) -> Sequence[RawRow]:
    """Read one list of objects, or an object a line."""
    whole = content.read()
    try:
        rows = strict_json(whole.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if "Extra data" not in error.msg:
            raise
        return list(_read_jsonl(io.BytesIO(whole)))
    if isinstance(rows, dict):
        rows = [rows]
    if not isinstance(rows, list):
        raise ValueError(f"it must be a list of objects, or an object a line, but is {one_line(rows, 60)}.")
    return [_object(row, f"row {number} of the list") for number, row in enumerate(rows, start=1)]


def _read_table(content: IO[bytes], *, ending: str) -> Iterable[RawRow]:
    return _tables().READERS[ending](content)


def _tables() -> ModuleType:
    from frozencore.tune.rows import tables  # the import takes a sixth of a second

    return tables


READERS: dict[str, Callable[[IO[bytes]], Iterable[RawRow]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    **{ending: partial(_read_table, ending=ending) for ending in (".csv", ".tsv", ".parquet", ".arrow")},
}
"""The readers of files, by ending."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = f"a {', '.join([*READERS][:-1])} or {[*READERS][-1]} file (also compressed, as .jsonl.gz or .jsonl.zst)"
_ROW_FILE = re.compile(
    rf"(.+)({'|'.join(map(re.escape, READERS))})({'|'.join(map(re.escape, COMPRESSIONS))})?", re.IGNORECASE
)


class RowFile(NamedTuple):
    """The parts of a row file's name: without its ending, the key of its reader, and its compression."""

    stem: str
    ending: str
    compression: str | None


def row_file(name: str) -> RowFile | None:
    """The parts of a row file's name, ``BEN.JSONL`` or ``anna.jsonl.gz``; None for a file of another kind."""
    match = _ROW_FILE.fullmatch(name)
    if match is None:
        return None
    stem, ending, packed = match.groups("")
    return RowFile(stem, ending.lower(), COMPRESSIONS.get(packed.lower()))
