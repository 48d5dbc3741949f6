"""Read rows from a file, the standard input, or a split of a data set on the hub or in a folder."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frozencore.errors import ConfigError, DataError
from frozencore.files.hub import hub_answers
from frozencore.quiet import with_attributes
from frozencore.tune.rows import Row
from frozencore.tune.rows.row_files import KINDS, parse_jsonl, read_file, require_file, without_fillers
from frozencore.words import one_line

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


def read_source(data: str) -> list[Row]:
    """Read every row of a source.

    Args:
        data: A file (:mod:`frozencore.tune.rows.row_files`); ``-`` for JSONL on the standard input; or a split of a
            data set, ``NAME:SPLIT`` or ``NAME:CONFIGURATION:SPLIT``, where the name is a hub id or a folder. A split
            may be sliced as in ``datasets``: ``train[:1000]``.

    Raises:
        DataError: The source is missing, empty or damaged.
        ConfigError: The standard input is a terminal.
    """
    if data == STANDARD_INPUT:
        return _read_standard_input()
    if not Path(data).is_file() and (found := _SPLIT.fullmatch(data)) is not None:
        return _read_split(found["name"], found["config"], found["split"])
    require_source(data)
    return read_file(Path(data), option="--data")


def require_source(data: str, *, option: str = "--data") -> None:
    """Check that a source exists and has a known kind, without reading a row.

    Args:
        option: The option that errors name.

    Raises:
        DataError: As in :func:`read_source`.
    """
    if data == STANDARD_INPUT or (not Path(data).is_file() and _SPLIT.fullmatch(data)):
        return
    if Path(data).is_dir():
        raise DataError(
            f"{option} must name {KINDS}, or a split of a folder's data set as {data}:train. It is a folder."
        )
    require_file(Path(data), option=option)


def named(data: str) -> str:
    """The name of a source on a model card; for a path only its last part, to keep the folder private."""
    return "standard input" if data == STANDARD_INPUT else Path(data).name if Path(data).exists() else data


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

    title = f"Data set {name}" + (f" ({config})" if config else "")
    # with the cache alone, as with HF_HUB_OFFLINE=1, datasets does not retry for half a minute
    offline = (folder is None and not _hub_has(name, title, way_out)) or settings.HF_HUB_OFFLINE
    place = name if folder is None else str(folder)
    try:
        with without_bars(), with_attributes(settings, HF_HUB_OFFLINE=offline):
            return load_dataset(place, config, split=split, cache_dir=None if folder is None else cache_of(folder))
    except Exception as error:  # datasets raises many kinds of errors, which are only reported
        where = "the hub or its cache" if folder is None else place
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


def _read_standard_input() -> list[Row]:
    if sys.stdin.isatty():
        raise ConfigError("--data - reads JSONL from a pipe or a file, but the standard input is a terminal.")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"The standard input must be UTF-8 text, but is not: {error}.") from error
    rows = list(parse_jsonl(text.split("\n"), "The standard input"))
    if not rows:
        raise DataError("The standard input holds no rows. Give at least one.")
    return rows


def _read_split(name: str, config: str | None, split: str) -> list[Row]:
    folder = Path(name) if Path(name).is_dir() else None
    if folder is None and _HUB_ID.fullmatch(name) is None:
        raise DataError(f"--data {name}:{split} must name a folder or a hub id (OWNER/NAME), but {name} is neither.")
    way_out = "Give the folder of a downloaded data set in place of its name, or a network."
    if folder is not None:
        way_out = "Give a configuration and a split that it has, and files of a kind that datasets reads."
    rows: list[Row] = load_split(name, config, split, folder=folder, way_out=way_out).to_list()
    return list(map(without_fillers, rows))  # not empty, because datasets refuses an empty split


def _hub_has(name: str, title: str, way_out: str) -> bool:
    """Return whether the hub answers for a data set; False means reading the cache."""
    from datasets.config import HF_DATASETS_CACHE
    from datasets.naming import camelcase_to_snakecase

    if hub_answers("dataset", name):
        return True
    *organisation, own = name.split("/")
    cached = "___".join([*organisation, camelcase_to_snakecase(own)])
    if not (Path(HF_DATASETS_CACHE) / cached).is_dir():
        raise DataError(f"{title} is not in the offline cache and the hub cannot be reached. {way_out}")
    return False
