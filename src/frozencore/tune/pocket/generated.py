"""A task's rows drawn by a seeded generator instead of read from a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.tasks import Origin, Split

GeneratedRow = dict[str, str]
_DRAWS_PER_ROW = 200


@dataclass(frozen=True)
class GeneratedSource:
    """Rows drawn once per seed, all different as text, then cut into two splits.

    Attributes:
        draw: Makes one row of the given kind, ``0 <= kind < num_kinds``. Kinds are the labels, or whatever
            else has to come in equal shares.
        text_fields: The fields that make up the prompt: no two rows, of either split, have the same.
        num_train: More than a task trains on: the rest is there for validation.
    """

    draw: Callable[[Random, int], GeneratedRow]
    num_kinds: int
    text_fields: tuple[str, ...]
    seed: int
    num_train: int = 2000
    num_evaluation: int = 500

    @property
    def origin(self) -> Origin:
        """The generator's seed; its two splits have no names."""
        return Origin("generated", f"seed {self.seed}", {"train": "rest", "evaluation": "first rows"})

    def rows(self, split: Split, data_root: Path | None = None) -> Sequence[Mapping[str, Any]]:
        """The rows of a split; ``data_root`` is not read.

        Every ``num_kinds`` consecutive rows hold each kind once, so any leading part of a split is balanced. There is
        no validation split of its own: rows that are not trained on serve.
        """
        drawn = _draw_rows(self)
        if split == "validation":
            return ()
        return drawn[: self.num_evaluation] if split == "evaluation" else drawn[self.num_evaluation :]


@cache
def _draw_rows(source: GeneratedSource) -> list[GeneratedRow]:
    rng = Random(source.seed)
    total = source.num_evaluation + source.num_train
    rows: list[GeneratedRow] = []
    seen: set[tuple[str, ...]] = set()
    while len(rows) < total:
        for kind in rng.sample(range(source.num_kinds), source.num_kinds):
            row = _draw_unseen(source, rng, kind, seen)
            seen.add(_text(source, row))
            rows.append(row)
    return rows[:total]


def _text(source: GeneratedSource, row: GeneratedRow) -> tuple[str, ...]:
    return tuple(row[field] for field in source.text_fields)


def _draw_unseen(source: GeneratedSource, rng: Random, kind: int, seen: set[tuple[str, ...]]) -> GeneratedRow:
    for _ in range(_DRAWS_PER_ROW):
        row = source.draw(rng, kind)
        if _text(source, row) not in seen:
            return row
    raise DataError(
        f"A generated task needs {source.num_train + source.num_evaluation} different rows, but after {len(seen)} "
        f"no new one of kind {kind} came in {_DRAWS_PER_ROW} draws. Ask for fewer rows."
    )
