"""Read a Hugging Face data set from the hub, its cache, or a folder of the same schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from frozencore.errors import DataError
from frozencore.tune.rows import Row
from frozencore.tune.rows.row_sources import load_split
from frozencore.tune.tasks import Origin, Split


@dataclass(frozen=True)
class HubDataset:
    """One configuration of a data set.

    Attributes:
        path: The hub id, ``org/name``; also the path below a data root.
        columns: The columns that every split must have.
        validation_split: A labeled split for neither training nor evaluation, if the data set has one.
        num_rows: Rows of each official split.
    """

    path: str
    evaluation_split: str
    columns: tuple[str, ...]
    train_split: str = "train"
    config: str | None = None
    validation_split: str | None = None
    num_rows: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Hub id and configuration."""
        return self.path + (f" ({self.config})" if self.config else "")

    @property
    def splits(self) -> dict[Split, str | None]:
        """The official name of each split; None for a validation split that does not exist."""
        return {"train": self.train_split, "validation": self.validation_split, "evaluation": self.evaluation_split}

    @property
    def origin(self) -> Origin:
        """The hub id and its splits."""
        splits: dict[Split, str] = {split: name for split, name in self.splits.items() if name is not None}
        return Origin(self.path, self.config or "default", splits)

    def rows(self, split: Split, data_root: Path | None) -> Sequence[Row]:
        """Every row of a split, in its official order; empty for a validation split that does not exist.

        Args:
            data_root: A folder that holds ``org/name``; ``None`` for the hub and its offline cache.

        Raises:
            DataError: The data cannot be loaded, lack a column, or are empty.
        """
        name = self.splits[split]
        if name is None:
            return ()
        folder = None if data_root is None else data_root / self.path
        if folder is not None and not folder.is_dir():
            raise DataError(
                f"Data set {self.name} must lie at {folder}, but there is no such folder. "
                f"Give the folder that holds {self.path} as --data-root, or leave it out to use the hub."
            )
        way_out = f"The way out: --data-root DIR (a folder that holds {self.path}, of the same schema), or a network."
        rows = load_split(self.path, self.config, name, folder=folder, way_out=way_out)
        missing = [column for column in self.columns if column not in rows.column_names]
        if missing:
            raise DataError(
                f"Data set {self.name} needs the columns {', '.join(self.columns)}, but its {name} split lacks "
                f"{', '.join(missing)} (it has {', '.join(rows.column_names)}). "
                f"Point --data-root at data of the hub's schema."
            )
        result: Sequence[Row] = rows
        return result
