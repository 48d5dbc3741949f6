"""Splits of data sets on the hub, in its cache or in a folder, read with ``datasets``, whose import takes a second."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from datasets import ReadInstruction, load_dataset, load_dataset_builder
from datasets import config as settings
from datasets.naming import camelcase_to_snakecase
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from frozencore.attributes import with_attributes
from frozencore.errors import DataError
from frozencore.files.hub_client import hub_answers
from frozencore.text import one_line
from frozencore.tune.rows.row import RawRow
from frozencore.tune.rows.row_sources import row_file, rows_of_file
from frozencore.tune.rows.tables import rows_of_arrow

_OF_A_FOLDER = ("name", "version", "description", "data_dir", "data_files", "sep")
"""Options of a data set that do not say how a cell is read."""
STATE = "state.json"
"""A file of ``Dataset.save_to_disk``, whose folders ``load_dataset`` refuses."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def read_split(name: str, config: str | None, split: str) -> list[RawRow]:
    """Read the rows of a split; raises the errors of :func:`load_split`."""
    folder = Path(name) if Path(name).is_dir() else None
    way_out = "Give the folder of a downloaded data set in place of its name, or a network."
    if folder is not None:
        way_out = "Give a configuration and a split that it has, and files of a kind that datasets reads."
        if tables := _separated_tables(folder, config, split):
            every = [row for file in tables for row in rows_of_file(file, str(file))]
            with suppress(ValueError):  # of a slice; load_split says what is wrong
                (part,) = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: len(every)})
                if len({tuple(row) for row in every}) == 1 and (left := every[part.from_ : part.to]):
                    return left
    rows = load_split(name, config, split, folder=folder, way_out=way_out)
    return list(rows_of_arrow(rows.with_format("arrow")[:]))  # not empty, because datasets refuses an empty split


def _separated_tables(folder: Path, config: str | None, split: str) -> list[Path]:
    """The CSV or TSV files of a split of a folder; none if it has others, or its card says how they are to be read.

    ``datasets`` would read ``007`` in them as 7, and ``None`` as nothing.
    """
    with suppress(Exception), without_bars():  # of many kinds; load_split says why the folder cannot be read
        builder = load_dataset_builder(str(folder), config, cache_dir=cache_of(folder))
        files = [Path(file) for file in (builder.config.data_files or {}).get(split.partition("[")[0], ())]
        kinds = {kind.ending if (kind := row_file(file.name)) else None for file in files}
        own, usual = vars(builder.config), vars(type(builder.config)())
        is_usual = builder.info.features is None and all(
            value == usual[name] for name, value in own.items() if name not in _OF_A_FOLDER
        )
        if is_usual and [(one, own["sep"]) for one in kinds] in ([(".csv", ",")], [(".tsv", "\t")]):
            return files
    return []


def load_split(name: str, config: str | None, split: str, *, folder: Path | None, way_out: str) -> Any:
    """Load every row of a split as a ``datasets.Dataset``; code of the data set is never run.

    Args:
        name: The hub id.
        folder: The local folder; ``None`` for the hub and its offline cache.
        way_out: The advice in an error.

    Raises:
        DataError: The split cannot be loaded; the message has the reason.
    """
    title = f"Data set {name}" + (f" ({config})" if config else "")
    offline = settings.HF_HUB_OFFLINE
    if folder is None and not (_HUB_ID.fullmatch(name) and hub_answers("dataset", name)):
        *organisation, last = name.split("/")
        if not (Path(settings.HF_DATASETS_CACHE) / "___".join([*organisation, camelcase_to_snakecase(last)])).is_dir():
            raise DataError(
                f"{title} is neither a folder nor in the offline cache, and the hub does not answer. {way_out}"
            )
        offline = True  # with the cache alone datasets does not retry for half a minute
    place, cache = (name, None) if folder is None else (str(folder), cache_of(folder))
    try:
        with without_bars(), with_attributes(settings, HF_HUB_OFFLINE=offline):
            if folder is not None and (folder / STATE).is_file():
                return load_dataset("arrow", config, split=split, cache_dir=cache, data_files=_saved_files(folder))
            return load_dataset(place, config, split=split, cache_dir=cache)
    except Exception as error:  # datasets raises many kinds of errors, which are only reported
        where = "the hub or its cache" if folder is None else place
        in_cache = isinstance(error, OSError) and error.filename and not str(error.filename).startswith(place)
        if in_cache:  # a home that cannot be written, or a full disk
            way_out = "Set HF_DATASETS_CACHE to a folder that can be written."
        raise DataError(f"{title} could not be read from {where}: {one_line(error, 200)} {way_out}") from error


def _saved_files(folder: Path) -> dict[str, list[str]]:
    """The files of a folder that ``Dataset.save_to_disk`` wrote, by the name of its split."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return {state.get("_split") or "train": [str(folder / file["filename"]) for file in state["_data_files"]]}


def cache_of(folder: Path) -> str:
    """The cache folder for the converted rows of a local folder.

    The cache of ``datasets`` identifies a folder with a card by its name and card only, so another folder of this name,
    or changed rows, would give the old rows.
    """
    files = [(path, path.stat()) for path in sorted(folder.resolve().rglob("*")) if path.is_file()]
    state = "\n".join(f"{path}|{stat.st_size}|{stat.st_mtime_ns}" for path, stat in files)
    return str(Path(settings.HF_DATASETS_CACHE) / "frozencore" / hashlib.sha256(state.encode()).hexdigest()[:32])


@contextmanager
def without_bars() -> Iterator[None]:
    """Turn off the progress bars of ``datasets`` inside."""
    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()
