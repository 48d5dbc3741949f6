"""Read a Hugging Face data set from the hub, its cache, or a folder of the same schema, and write such a folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.rows import Row
from frozencore.tune.rows.row_sources import cache_of, load_split, without_bars
from frozencore.tune.tasks import Origin, Split

_WORDS = (
    "river", "teacher", "engine", "garden", "letter", "planet", "doctor", "window", "market", "forest", "singer",
    "bottle", "island", "report", "winter", "bridge", "farmer", "mirror", "ticket", "school",
)  # fmt: skip


@dataclass(frozen=True)
class HubDataset:
    """One configuration of a data set.

    Attributes:
        path: The hub id, ``org/name``; also the path below a data root.
        columns: The columns that every split must have.
        validation_split: A labeled split for neither training nor evaluation, if the data set has one.
        num_rows: Rows of each official split.
        sample: A row of the schema, from which rehearsals invent rows.
        labels: The column of the label, and all labels.
    """

    path: str
    evaluation_split: str
    columns: tuple[str, ...]
    train_split: str = "train"
    config: str | None = None
    validation_split: str | None = None
    num_rows: Mapping[str, int] = field(default_factory=dict, hash=False)
    sample: Row = field(default_factory=dict, hash=False)
    labels: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)

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

    def forget(self, data_root: Path) -> None:
        """Remove ``datasets``' cached copy of the rows of a local folder."""
        shutil.rmtree(cache_of(data_root / self.path), ignore_errors=True)

    def made_up(self, rng: Random, number: int) -> dict[str, Any]:
        """Make a row like the sample with meaningless words; labels rotate with the row's number."""
        labels = {column: every[number % len(every)] for column, every in self.labels.items()}
        return {column: _reworded(value, rng) for column, value in self.sample.items()} | labels


def write_hub_folders(root: Path, contents: Mapping[HubDataset, Mapping[str, Any]]) -> None:
    """Write data sets under ``root`` for :meth:`HubDataset.rows`: Parquet files, and a card.

    Args:
        contents: The official splits of each configuration, ``datasets.Dataset`` by name. All configurations of one
            hub id must come together, because they share a card.
    """
    cards: dict[str, list[str]] = {}
    for source, splits in contents.items():
        config = source.config or "default"
        card = cards.setdefault(source.path, ["---", "configs:"])
        card += [f"- config_name: {config}", "  data_files:"]
        for name, rows in splits.items():
            file = root / source.path / config / f"{name}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            with without_bars():
                rows.to_parquet(str(file))
            card += [f"  - split: {name}", f"    path: {config}/{name}.parquet"]
    for path, card in cards.items():
        (root / path / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")


def _reworded(value: Any, rng: Random) -> Any:
    """Replace words of three letters or more in a value; labels such as "B" and numbers stay."""
    if isinstance(value, str):
        return re.sub(r"\b[A-Za-z][a-z]{2,}\b", lambda _: rng.choice(_WORDS), value)
    if isinstance(value, Mapping):
        return {key: _reworded(part, rng) for key, part in value.items()}
    return [_reworded(part, rng) for part in value] if isinstance(value, list) else value
