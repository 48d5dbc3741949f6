"""Where rows of one's own come from: a file, the standard input, or a split of a data set of the hub or on disk."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from frozencore.errors import ConfigError, DataError
from frozencore.tune.rows.row_files import KINDS, Row, parse_jsonl, read_file, require_file
from frozencore.tune.tasks.hub_split import load_split

STANDARD_INPUT = "-"
_SPLIT = re.compile(r"(?P<name>[^:]+)(:(?P<config>[^:\[\]]+))?:(?P<split>\w[\w.-]*(\[[^\]]*\])?)")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def read_source(data: str) -> list[Row]:
    """Every row of it as it is.

    Args:
        data: A file (:mod:`frozencore.tune.rows.row_files`); ``-``, JSONL on the standard input; or a data set's split,
            ``NAME:SPLIT`` or ``NAME:CONFIGURATION:SPLIT``, whose name is a hub id or a folder. A split may be cut as
            ``datasets`` has it: ``train[:1000]``.

    Raises:
        DataError: It is absent, empty or damaged.
        ConfigError: The standard input is a terminal.
    """
    if data == STANDARD_INPUT:
        return _read_standard_input()
    if not Path(data).is_file() and (found := _SPLIT.fullmatch(data)) is not None:
        return _read_split(found["name"], found["config"], found["split"])
    _refuse_folder(data)
    return read_file(Path(data), option="--data")


def require_source(data: str) -> None:
    """Refuse a source that does not exist, or a file of another kind, without reading a row.

    Raises:
        DataError: As :func:`read_source`.
    """
    if data != STANDARD_INPUT and (Path(data).is_file() or _SPLIT.fullmatch(data) is None):
        _refuse_folder(data)
        require_file(Path(data), option="--data")


def _refuse_folder(data: str) -> None:
    if Path(data).is_dir():
        raise DataError(f"--data must name {KINDS}, or a split of a folder's data set as {data}:train. It is a folder.")


def named(data: str) -> str:
    """What a model card calls it: a path by its last name, for where that lies is nobody else's."""
    return "standard input" if data == STANDARD_INPUT else Path(data).name if Path(data).exists() else data


def _read_standard_input() -> list[Row]:
    if sys.stdin.isatty():
        raise ConfigError("--data - reads JSONL from a pipe or a file, but the standard input is a terminal.")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
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
    return rows  # one at least: datasets refuses others
