"""What a rehearsal takes a few rows of: a data set of the hub's schema, at hand or made up, or a user's own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import yaml

from frozencore.errors import DataError
from frozencore.files.hub import without_hub
from frozencore.files.strict_yaml import read_yaml
from frozencore.files.whole_file import write_lines, write_text
from frozencore.tune.tasks import Source, Split
from frozencore.tune.tasks.described import FileSource
from frozencore.tune.tasks.hub import HubDataset

SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")


class HubOriginal:
    """A data set of the hub's schema: its rows where it is at hand, else rows made up, of the official numbers.

    Attributes:
        missing: Why it is not at hand; empty where it is.

    Raises:
        DataError: It is not at hand, and its task makes no rows up.
    """

    def __init__(self, source: HubDataset, data_root: Path | None) -> None:
        self.source = source
        self.missing = ""
        self._rows: dict[Split, Any] = {}
        try:
            with without_hub():
                self._rows = {split: source.rows(split, data_root) for split in SPLITS}
        except DataError as error:
            self.missing = str(error)
            if not source.sample:
                raise

    @cached_property
    def num_rows(self) -> dict[Split, int]:
        """Rows of every split."""
        if not self.missing:
            return {split: len(rows) for split, rows in self._rows.items()}
        return {split: self.source.num_rows.get(str(self.source.splits[split]), 0) for split in SPLITS}

    def few(self, num_rows: Mapping[Split, int]) -> dict[str, Any]:
        """So many rows of each official split, spread over it, as ``datasets.Dataset`` by the split's name."""
        return {str(self.source.splits[split]): self._few(split, count) for split, count in num_rows.items()}

    def _few(self, split: Split, count: int) -> Any:
        from datasets import Dataset

        if not self.missing:
            return self._rows[split].select(spread(len(self._rows[split]), count))
        rng = Random(f"{self.source.name} {split}")
        return Dataset.from_list([self.source.made_up(rng, number) for number in range(count)])


def spread(num_rows: int, count: int) -> list[int]:
    """Numbers of so many rows, evenly over all: a split may be sorted by its labels."""
    return [place * num_rows // count for place in range(count)]


def num_rows_of(source: Source) -> dict[Split, int]:
    """Rows of every split of files or of a generator."""
    return {split: len(source.rows(split, None)) for split in SPLITS}


def copy_own_task(path: Path, source: FileSource, num_rows: Mapping[Split, int], folder: Path) -> Path:
    """A user's YAML task with few rows, in a folder of its own: the copy's YAML file."""
    named: dict[Split, str] = {split: f"{split}.jsonl" for split in num_rows}
    for split, count in num_rows.items():
        rows: Sequence[Mapping[str, Any]] = source.rows(split, None)
        write_lines(folder / named[split], [rows[place] for place in spread(len(rows), count)])
    copy = folder / path.name
    write_text(copy, yaml.safe_dump({**read_yaml(path), **named}, allow_unicode=True))
    return copy
