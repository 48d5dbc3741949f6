"""Compare one column of a table of task means with each other column, as in the paper's significance tables.

The table comes from a study or a CSV file, which is read strictly: a cell that is not a number is an error.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from frozencore.errors import DataError
from frozencore.words import unknown_name
from frozencore_lab.reports.labels import FAMILIES, family_of
from frozencore_lab.reports.sheet import without_apostrophe
from frozencore_lab.reports.statistics import (
    bootstrap_interval,
    differences,
    holm,
    mean,
    mean_ranks,
    paired_t,
    signed_rank,
    whole,
    wins_ties_losses,
)

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
SUMMARIES = ("mean", "average", "avg", "macro-average", "total")


@dataclass(frozen=True)
class TaskTable:
    """Task means by column and task; ``columns[name][task]`` is None for a missing cell."""

    tasks: tuple[str, ...]
    columns: Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class Pair:
    """The reference against one other column; a positive difference favours the reference.

    Attributes:
        wins, ties, losses: Tasks on which the reference is better, equal, worse.
        wilcoxon_p, t_p: Two-sided and unadjusted; t_p is None if all differences are equal.
        wilcoxon_holm, t_holm: Adjusted for all compared columns.
        exact: Whether ``wilcoxon_p`` is exact; the normal approximation is used for more than 100 tasks.
        interval: The 95 % interval of the mean difference, by bootstrap over tasks.
    """

    other: str
    mean_difference: float
    interval: tuple[float, float]
    wins: int
    ties: int
    losses: int
    wilcoxon_p: float
    wilcoxon_holm: float
    exact: bool
    t_p: float | None
    t_holm: float | None


@dataclass(frozen=True)
class Comparison:
    """Means, ranks (1 is best) and family means of every column, and each comparison with the reference."""

    reference: str
    tasks: tuple[str, ...]
    lower_is_better: bool
    means: Mapping[str, float]
    family_means: Mapping[str, Mapping[str, float]]
    mean_ranks: Mapping[str, float]
    pairs: tuple[Pair, ...]


def analyse(table: TaskTable, reference: str, *, lower_is_better: bool = False) -> Comparison:
    """Compare a column with every other one over the tasks.

    Raises:
        DataError: The column is unknown, there is nothing to compare, or a cell is missing or not finite.
    """
    if reference not in table.columns:
        raise DataError(unknown_name("column", reference, table.columns))
    if len(table.columns) < 2 or len(table.tasks) < 2:
        raise DataError(
            f"A comparison needs two columns and two tasks, but {len(table.columns)} and {len(table.tasks)} came."
        )
    columns = table.columns.items()
    values = {name: whole({f"{name} on {task}": cells.get(task) for task in table.tasks}) for name, cells in columns}
    means = {name: mean({task: cells[task] for task in table.tasks}) for name, cells in columns}
    families = {name: family_means(cells) for name, cells in columns}
    ranks = mean_ranks(values, lower_is_better=lower_is_better)
    pairs = _pairs(values, reference, -1 if lower_is_better else 1)
    return Comparison(reference, table.tasks, lower_is_better, means, families, ranks, pairs)


def family_means(by_task: Mapping[str, float | None]) -> dict[str, float]:
    """The mean over the tasks of each complete family of the paper."""
    members: dict[str, dict[str, float | None]] = {}
    for task, value in by_task.items():
        if (family := family_of(task)) is not None:
            members.setdefault(family, {})[task] = value
    return {family: mean(own) for family, own in members.items() if len(own) == len(FAMILIES[family])}


def _pairs(values: Mapping[str, Sequence[float]], reference: str, sign: int) -> tuple[Pair, ...]:
    others = [name for name in values if name != reference]
    gains = {name: [sign * d for d in differences(values[reference], values[name])] for name in others}
    ranked = [signed_rank(gains[name]) for name in others]
    t_p = [paired_t(gains[name]) for name in others]
    wilcoxon_holm, t_holm = holm([test.p for test in ranked]), holm(t_p)
    pairs = []
    for i, name in enumerate(others):
        adjusted = wilcoxon_holm[i]
        assert adjusted is not None
        pairs.append(
            Pair(
                name, sum(gains[name]) / len(gains[name]), bootstrap_interval(gains[name]),
                *wins_ties_losses(gains[name]), ranked[i].p, adjusted, ranked[i].exact, t_p[i], t_holm[i],
            )
        )  # fmt: skip
    return tuple(pairs)


def read_task_means(path: Path) -> TaskTable:
    """Read a CSV of task means: a heading line, then a line for each task, with its name and a number for each column.

    Raises:
        DataError: A line or cell is wrong; the message names it.
    """
    try:
        lines = list(csv.reader(StringIO(path.read_text(encoding="utf-8-sig")), strict=True))
        lines = [[without_apostrophe(cell) for cell in line] for line in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path} cannot be read as a CSV table: {reason}.") from error
    rows = [(i, [cell.strip() for cell in line]) for i, line in enumerate(lines, 1) if any(map(str.strip, line))]
    if len(rows) < 2:
        raise DataError(f"{path} holds no table: a heading line and a line for each task are needed.")
    (_, (_, *names)), *body = rows
    if not names:
        raise DataError(
            f"{path} has one column only. Separate columns with commas: the task, then one for each method."
        )
    _require_distinct(path, "column", names)
    _require_distinct(path, "task", [cells[0] for _, cells in body])
    columns: dict[str, dict[str, float | None]] = {name: {} for name in names}
    for i, (task, *cells) in body:
        if task.casefold() in SUMMARIES:
            raise DataError(f"{path}, line {i}: {task!r} is no task but a summary. Leave that line out.")
        if len(cells) != len(names):
            raise DataError(f"{path}, line {i}: {task} must have {len(names)} numbers, but {len(cells)} came.")
        for name, cell in zip(names, cells, strict=True):
            columns[name][task] = _number(cell, f"{path}, line {i}: {name} on {task}")
    return TaskTable(tuple(cells[0] for _, cells in body), columns)


def _number(cell: str, where: str) -> float:
    if not cell:
        raise DataError(f"{where} is missing. Fill it in, or leave the line or the column out.")
    if not NUMBER.fullmatch(cell) or abs(float(cell)) == float("inf"):
        raise DataError(f"{where} must be a finite number, but {cell!r} came.")
    return float(cell)


def _require_distinct(path: Path, what: str, names: Sequence[str]) -> None:
    for name in names:
        if not name:
            raise DataError(f"{path} has a {what} without a name.")
        if names.count(name) > 1:
            raise DataError(f"{path} has the {what} {name!r} twice.")
