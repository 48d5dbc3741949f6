"""Rows of a Hugging Face data set, from the hub, its cache, or a local folder of the same schema."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.tasks.hub_split import cache_of, load_split
from frozencore.tune.tasks.task import Origin, Split


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
        shutil.rmtree(cache_of(Path(data_root) / self.path), ignore_errors=True)

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
        folder = None if data_root is None else Path(data_root) / self.path
        if folder is not None and not folder.is_dir():
            raise DataError(
                f"{self._title} must lie at {folder}, but there is no such folder. "
                f"Give the folder that holds {self.path} as --data-root, or leave it out to use the hub."
            )
        way_out = f"The way out: --data-root DIR (a folder that holds {self.path}, of the same schema), or a network."
        return load_split(self.path, self.config, name, folder=folder, way_out=way_out)
