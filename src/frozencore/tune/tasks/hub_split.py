"""One split of a data set, from the hub, its offline cache, or a folder of its files; never by its own code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frozencore.errors import DataError
from frozencore.files.hub import hub_answers
from frozencore.words import one_line


def load_split(name: str, config: str | None, split: str, *, folder: Path | None, way_out: str) -> Any:
    """Every row of a split, as a ``datasets.Dataset``.

    Args:
        name: The hub id.
        folder: Where it lies on disk; ``None`` for the hub and its offline cache.
        way_out: What an error says to do.

    Raises:
        DataError: In one line, why it cannot be had.
    """
    from datasets import load_dataset  # a second of import that other rows need not pay

    title = f"Data set {name}" + (f" ({config})" if config else "")
    offline = folder is None and not _hub_has(name, title, way_out)
    place = name if folder is None else str(folder)
    try:
        with without_bars(), _offline(offline):
            return load_dataset(place, config, split=split, cache_dir=None if folder is None else cache_of(folder))
    except Exception as error:  # datasets raises a dozen kinds, each for a state of the data that we only report
        where = "the hub or its cache" if folder is None else place
        raise DataError(f"{title} could not be read from {where}: {one_line(error, 200)} {way_out}") from error


def cache_of(folder: Path) -> str:
    """Where ``datasets`` keeps the converted rows of a local folder.

    The usual place knows a folder that has a card by its name and its card alone: another folder of that name, or
    other rows in the same one, would be answered with the old rows.
    """
    from datasets.config import HF_DATASETS_CACHE

    files = [(path, path.stat()) for path in sorted(folder.resolve().rglob("*")) if path.is_file()]
    state = "\n".join(f"{path}|{stat.st_size}|{stat.st_mtime_ns}" for path, stat in files)
    return str(Path(HF_DATASETS_CACHE) / "frozencore" / hashlib.sha256(state.encode()).hexdigest()[:32])


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside, ``datasets`` shows no progress bars of its own."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


def _hub_has(name: str, title: str, way_out: str) -> bool:
    """Whether to ask the hub; False takes the cache."""
    from datasets.config import HF_DATASETS_CACHE
    from datasets.naming import camelcase_to_snakecase

    if hub_answers("dataset", name):
        return True
    *organisation, own = name.split("/")
    cached = "___".join([*organisation, camelcase_to_snakecase(own)])
    if not (Path(HF_DATASETS_CACHE) / cached).is_dir():
        raise DataError(f"{title} is not in the offline cache and the hub cannot be reached. {way_out}")
    return False


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """As under ``HF_HUB_OFFLINE=1``: a data set that is in the cache is not asked for with half a minute of retries."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
