"""Read rows from a file, the standard input, or a split of a data set on the hub or in a folder."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from frozencore.errors import ConfigError, DataError
from frozencore.files.hub import hub_answers
from frozencore.quiet import with_attributes
from frozencore.text import nearest_name, one_line
from frozencore.tune.rows import RawRow

Data = str | tuple[str, ...]
"""One source, or several."""
STANDARD_INPUT = "-"
_SPLIT = re.compile(r"(?P<name>[^:]+)(:(?P<config>[^:\[\]]+))?:(?P<split>\w[\w.-]*(\[[^\]]*\])?)")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def in_words(data: Data | None) -> str:
    """The sources as given."""
    return data if isinstance(data, str) else " and ".join(data or ())


def sources_of(data: Data) -> tuple[str, ...]:
    """The sources that ``--data`` names.

    Raises:
        ConfigError: A source comes twice.
    """
    names = (data,) if isinstance(data, str) else data
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"Each --data is another source, but {', '.join(sorted(twice))} comes twice. Leave one out.")
    return names


def named(data: str) -> str:
    """The name of a source on a model card; for a path only its last part, to keep the folder private."""
    return "standard input" if data == STANDARD_INPUT else Path(data).name if Path(data).exists() else data


def require_source(data: str, *, option: str = "--data") -> None:
    """Check that a source exists and has a known kind, without reading a row; errors name ``option``.

    Raises:
        DataError: As in :func:`read_source`.
    """
    path = Path(data)
    if data == STANDARD_INPUT or (not path.is_file() and _SPLIT.fullmatch(data)):
        return
    if path.is_dir():
        raise DataError(
            f"{option} must name {KINDS}, or a split of a folder's data set as {data}:train. It is a folder."
        )
    if path.is_symlink() and not path.exists():
        raise DataError(f"{option}: {path} is a link to {path.readlink()}, which does not exist. Make the link again.")
    if not path.is_file():
        near = nearest_name(path.name, [other.name for other in path.parent.glob("*") if row_file(other.name)])
        guess = f" Did you mean {path.with_name(near)}?" if near else f" {option} takes {KINDS}."
        raise DataError(f"{option}: there is no file {path}.{guess}")
    if row_file(path.name) is None:
        raise DataError(f"{option} must name {KINDS}, got {path.name!r}. Convert it to one of these.")


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
    if data != STANDARD_INPUT and not path.is_file() and (found := _SPLIT.fullmatch(data)) is not None:
        return _read_split(found["name"], found["config"], found["split"])
    if data == STANDARD_INPUT and (sys.stdin is None or sys.stdin.isatty()):
        kind = "closed" if sys.stdin is None else "a terminal"
        raise ConfigError(f"--data - reads JSONL from a pipe or a file, but the standard input is {kind}.")
    return _rows_of(path, origin)


def first_rows(data: str, num_rows: int = 100) -> list[RawRow]:
    """The first rows of a file, to see their columns; none of other sources, which cannot be read twice or at once.

    Raises:
        DataError: The file is empty or damaged.
    """
    return _rows_of(Path(data), data, num_rows) if Path(data).is_file() else []


def _rows_of(path: Path, origin: str, num_rows: int | None = None) -> list[RawRow]:
    name = row_file(path.name)
    try:
        if name is None:
            rows = list(_read_jsonl(io.BytesIO(sys.stdin.buffer.read()), origin))
        else:
            with _opened(path, name.compression) as content:
                rows = list(islice(READERS[name.ending](content, origin), num_rows))
    except UnicodeDecodeError as error:
        raise DataError(f"{origin} must be UTF-8 text, but is not: {error}. Save it as UTF-8.") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataError(f"{origin} cannot be decompressed: {one_line(error, 200)}. Compress it again.") from error
    if not rows:
        raise DataError(f"{origin} holds no rows. Give at least one.")
    return rows


def _opened(path: Path, compression: str | None) -> IO[bytes]:
    if compression is None:
        return path.open("rb")
    import pyarrow  # the import takes a fifth of a second

    stream: IO[bytes] = pyarrow.input_stream(str(path), compression=compression)
    return stream


def _read_jsonl(content: IO[bytes], origin: str) -> Iterator[RawRow]:
    return _jsonl_rows(io.TextIOWrapper(content, encoding="utf-8-sig"), origin)


def _jsonl_rows(lines: Iterable[str], origin: str) -> Iterator[RawRow]:
    """Yield a row from each line that is not empty; errors name the line and ``origin``."""
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
        _require_once((key for key, _ in pairs), "key")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def json_or_value(given: Any, kind: type[Any], rule: str) -> Any:
    """A value, or that of a JSON text; ``DataError`` with the rule if it is not of this kind, or not JSON."""
    try:
        found = strict_json(given) if isinstance(given, str) else given
        json.dumps(found, allow_nan=False, default=str)  # a template would write NaN, which JSON has not
    except (ValueError, RecursionError) as error:
        raise DataError(f"{rule}, or that as JSON: {error}.") from error
    if not isinstance(found, kind):
        raise DataError(f"{rule}, or that as JSON, but {given!r:.60} came.")
    return found


def _require_once(names: Iterable[str], kind: str) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"the {kind} {twice[0]!r} is given twice")


def _read_json(content: IO[bytes], origin: str) -> Sequence[RawRow]:
    try:
        rows = strict_json(content.read().decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} must be one JSON list of objects, but is none: {one_line(error)}.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{origin} must be one JSON list of objects. A file with an object a line ends in .jsonl.")
    return rows


def _read_separated(content: IO[bytes], origin: str, *, kind: str, separator: str) -> list[RawRow]:
    """Read a table as text: ``datasets`` would read ``007`` as 7, and ``NA`` as nothing."""
    import pandas  # the import takes a second

    try:
        table = pandas.read_csv(
            content, sep=separator, header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig"
        )
        lines = table.fillna("").to_numpy().tolist()
        while lines and not any(map(str.strip, lines[0])):  # before the header
            lines.pop(0)
        names, *rows = lines or [[]]
        while names and not names[-1].strip() and not any(row[len(names) - 1].strip() for row in rows):
            names.pop()  # separators at the end of the line, as spreadsheets write them
        _require_once(names, "column")
    except pandas.errors.EmptyDataError:
        return []
    except UnicodeDecodeError:
        raise
    except ValueError as error:  # pandas' errors of parsing among them
        raise DataError(f"{origin} cannot be read as {kind}: {one_line(error, 200)}") from error
    return [dict(zip(names, row, strict=False)) for row in rows]


def _read_arrow(content: IO[bytes], origin: str, *, kind: str) -> Iterable[RawRow]:
    """Read Parquet, or Arrow as a file or as the stream that ``datasets`` writes."""
    from pyarrow import ArrowException, BufferReader, ipc, parquet

    whole = content.read()
    try:
        if kind == "Parquet":
            table = parquet.read_table(BufferReader(whole))
        else:
            table = (ipc.open_file(whole) if whole.startswith(b"ARROW1") else ipc.open_stream(whole)).read_all()
        _require_once(table.column_names, "column")
        return list(map(_without_fillers, table.to_pylist(maps_as_pydicts="strict")))
    except (ArrowException, OSError, ValueError) as error:  # OSError from Thrift, ValueError from invalid UTF-8
        raise DataError(f"{origin} cannot be read as {kind}: {one_line(error, 200)} Write it again.") from error


def _without_fillers(row: RawRow) -> RawRow:
    """A row of Arrow without keys that are null inside its columns.

    Arrow gives each object of a column the keys of all others, with null in them, and a template would write these. A
    null of the row's own looks the same, so it goes too, as with TRL's ``remove_none_values``.
    """

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items() if item is not None}
        return [filled(item) for item in value] if isinstance(value, list) else value

    return {column: filled(value) for column, value in row.items()}


READERS: dict[str, Callable[[IO[bytes], str], Iterable[RawRow]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(_read_separated, kind="CSV", separator=","),
    ".tsv": partial(_read_separated, kind="TSV", separator="\t"),
    ".parquet": partial(_read_arrow, kind="Parquet"),
    ".arrow": partial(_read_arrow, kind="Arrow"),
}
"""The readers of files, by ending. They keep the text of each value: ``datasets`` would read dates as such."""
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
    found = _ROW_FILE.fullmatch(name)
    if found is None:
        return None
    stem, ending, packed = found.groups("")
    return RowFile(stem, ending.lower(), COMPRESSIONS.get(packed.lower()))


def _read_split(name: str, config: str | None, split: str) -> list[RawRow]:
    folder = Path(name) if Path(name).is_dir() else None
    if folder is None and _HUB_ID.fullmatch(name) is None:
        raise DataError(f"--data {name}:{split} must name a folder or a hub id (OWNER/NAME), but {name} is neither.")
    way_out = "Give the folder of a downloaded data set in place of its name, or a network."
    if folder is not None:
        way_out = "Give a configuration and a split that it has, and files of a kind that datasets reads."
    rows: list[RawRow] = load_split(name, config, split, folder=folder, way_out=way_out).to_list()
    return list(map(_without_fillers, rows))  # not empty, because datasets refuses an empty split


def load_split(name: str, config: str | None, split: str, *, folder: Path | None, way_out: str) -> Any:
    """Load every row of a split as a ``datasets.Dataset``; code of the data set is never run.

    Args:
        name: The hub id.
        folder: The local folder; ``None`` for the hub and its offline cache.
        way_out: The advice in an error.

    Raises:
        DataError: The split cannot be loaded; the message has the reason.
    """
    from datasets import config as settings  # the import takes a second
    from datasets import load_dataset
    from datasets.naming import camelcase_to_snakecase

    title = f"Data set {name}" + (f" ({config})" if config else "")
    offline = settings.HF_HUB_OFFLINE
    if folder is None and not hub_answers("dataset", name):
        *organisation, own = name.split("/")
        if not (Path(settings.HF_DATASETS_CACHE) / "___".join([*organisation, camelcase_to_snakecase(own)])).is_dir():
            raise DataError(f"{title} is not in the offline cache and the hub cannot be reached. {way_out}")
        offline = True  # with the cache alone datasets does not retry for half a minute
    place, cache = (name, None) if folder is None else (str(folder), cache_of(folder))
    try:
        with without_bars(), with_attributes(settings, HF_HUB_OFFLINE=offline):
            return load_dataset(place, config, split=split, cache_dir=cache)
    except Exception as error:  # datasets raises many kinds of errors, which are only reported
        where = "the hub or its cache" if folder is None else place
        in_cache = isinstance(error, OSError) and error.filename and not str(error.filename).startswith(place)
        if in_cache:  # a home that cannot be written, or a full disk
            way_out = "Set HF_DATASETS_CACHE to a folder that can be written."
        raise DataError(f"{title} could not be read from {where}: {one_line(error, 200)} {way_out}") from error


def cache_of(folder: Path) -> str:
    """The cache folder for the converted rows of a local folder.

    ``datasets``' own cache identifies a folder with a card by its name and card only, so another folder of this name,
    or changed rows, would give the old rows.
    """
    from datasets.config import HF_DATASETS_CACHE

    files = [(path, path.stat()) for path in sorted(folder.resolve().rglob("*")) if path.is_file()]
    state = "\n".join(f"{path}|{stat.st_size}|{stat.st_mtime_ns}" for path, stat in files)
    return str(Path(HF_DATASETS_CACHE) / "frozencore" / hashlib.sha256(state.encode()).hexdigest()[:32])


@contextmanager
def without_bars() -> Iterator[None]:
    """Turn off the progress bars of ``datasets`` inside."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()
