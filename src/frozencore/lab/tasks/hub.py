"""Rows of a Hugging Face data set, from the hub, its cache, or a local folder of the same schema."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.hub import hub_answers
from frozencore.lab.tasks.task import Origin, Split
from frozencore.one_line import one_line


@dataclass(frozen=True)
class HubDataset:
    """One configuration of a data set.

    Attributes:
        path: The hub id, ``org/name``; also where it lies under a data root.
        validation_split: A labeled split that is neither trained nor evaluated on, where the data set has one.
        columns: What every split must have.
        num_rows: Of each official split.
        made_up: Draws a row of the schema, by its number in the split, where the data set is not at hand.
    """

    path: str
    train_split: str
    evaluation_split: str
    columns: tuple[str, ...]
    config: str | None = None
    validation_split: str | None = None
    num_rows: Mapping[str, int] = field(default_factory=dict, hash=False)
    made_up: Callable[[Random, int], dict[str, Any]] | None = None

    @property
    def origin(self) -> Origin:
        """The hub id and its splits."""
        named = {"train": self.train_split, "validation": self.validation_split, "evaluation": self.evaluation_split}
        splits = {split: name for split, name in named.items() if name is not None}
        return Origin(self.path, self.config or "default", splits)  # type: ignore[arg-type]

    def rows(self, split: Split, data_root: Path | None) -> Sequence[Mapping[str, Any]]:
        """Every row of a split, in its official order; none for a validation split that does not exist.

        Args:
            data_root: A folder that holds ``org/name``; ``None`` for the hub and its offline cache.

        Raises:
            DataError: The data cannot be had, lack a column, or are empty.
        """
        name = self.splits[split]
        if name is None:
            return ()
        rows = self._load(name, data_root)
        missing = [column for column in self.columns if column not in rows.column_names]
        if missing:
            raise DataError(
                f"{self._title} needs the columns {', '.join(self.columns)}, but its {name} split lacks "
                f"{', '.join(missing)} (it has {', '.join(rows.column_names)}). "
                f"Point --data-root at data of the hub's schema."
            )
        result: Sequence[Mapping[str, Any]] = rows
        return result

    def forget(self, data_root: Path) -> None:
        """Remove what ``datasets`` has kept of the rows in a local folder, beside that folder."""
        kept = _cache_of(str(Path(data_root) / self.path), data_root)
        if kept is not None:
            shutil.rmtree(kept, ignore_errors=True)

    @property
    def splits(self) -> dict[Split, str | None]:
        """The official name of each split; None for a validation split that does not exist."""
        return {"train": self.train_split, "validation": self.validation_split, "evaluation": self.evaluation_split}

    @property
    def name(self) -> str:
        """Hub id and configuration."""
        return self.path + (f" ({self.config})" if self.config else "")

    @property
    def _title(self) -> str:
        return f"Data set {self.name}"

    def _load(self, name: str, data_root: Path | None) -> Any:
        from datasets import load_dataset  # a second of import that other tasks need not pay

        place = self.path if data_root is None else str(Path(data_root) / self.path)
        offline = data_root is None and not self._hub_has()
        if data_root is not None and not Path(place).is_dir():
            raise DataError(
                f"{self._title} must lie at {place}, but there is no such folder. "
                f"Give the folder that holds {self.path} as --data-root, or leave it out to use the hub."
            )
        try:
            with without_bars(), _offline(offline):
                return load_dataset(place, self.config, split=name, cache_dir=_cache_of(place, data_root))
        except Exception as error:  # datasets raises a dozen kinds, each for a state of the data that we only report
            reason = one_line(error, 200)
            raise DataError(
                f"{self._title} could not be read from {'the hub or its cache' if data_root is None else place}: "
                f"{reason} The way out: --data-root DIR with the same schema, or a network."
            ) from error

    def _hub_has(self) -> bool:
        """Whether to ask the hub; False takes the cache."""
        from datasets.config import HF_DATASETS_CACHE
        from datasets.naming import camelcase_to_snakecase

        if hub_answers("dataset", self.path):
            return True
        organisation, name = self.path.split("/")
        if not (Path(HF_DATASETS_CACHE) / f"{organisation}___{camelcase_to_snakecase(name)}").is_dir():
            raise DataError(
                f"{self._title} is not in the offline cache and the hub cannot be reached. "
                f"The way out: --data-root DIR (a folder that holds {self.path}), or a network."
            )
        return False


def _cache_of(place: str, data_root: Path | None) -> str | None:
    """Where the converted rows of a local folder are kept; None, the usual place, for those of the hub.

    The usual place knows a folder that has a card by its name and its card alone: another folder of that name, or
    other rows in the same one, would be answered with the old rows.
    """
    if data_root is None:
        return None
    from datasets.config import HF_DATASETS_CACHE

    files = [(path, path.stat()) for path in sorted(Path(place).resolve().rglob("*")) if path.is_file()]
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
