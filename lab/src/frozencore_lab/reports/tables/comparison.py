"""One column of a table of task means against each of the others: the statistics of the paper's significance tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from frozencore.errors import DataError
from frozencore.words import unknown_name
from frozencore_lab.reports.labels import FAMILIES, family_of
from frozencore_lab.reports.statistics.over_tasks import (
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


@dataclass(frozen=True)
class TaskTable:
    """Task means by column and task; ``columns[name][task]`` is None where the cell is missing."""

    tasks: tuple[str, ...]
    columns: Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class Pair:
    """The reference against one other column; a difference above 0 is in the reference's favour.

    Attributes:
        wins, ties, losses: Tasks on which the reference is better, equal, worse.
        wilcoxon_p, t_p: Two-sided and unadjusted; t_p is None where all differences are one number.
        wilcoxon_holm, t_holm: Adjusted for all the columns that the reference was compared with.
        exact: Whether ``wilcoxon_p`` is counted out; the normal approximation beyond 100 tasks.
        interval: Of the mean difference, 95 %, bootstrap over tasks.
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
    """Means, ranks (1 the best) and family means of every column, and each pair with the reference."""

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
    values = {
        name: whole({f"{name} on {task}": cells.get(task) for task in table.tasks})
        for name, cells in table.columns.items()
    }
    return Comparison(
        reference,
        table.tasks,
        lower_is_better,
        {name: mean({task: cells[task] for task in table.tasks}) for name, cells in table.columns.items()},
        {name: family_means(cells) for name, cells in table.columns.items()},
        mean_ranks(values, lower_is_better=lower_is_better),
        _pairs(values, reference, -1 if lower_is_better else 1),
    )


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain values."""
    return asdict(comparison)


def family_means(by_task: Mapping[str, float | None]) -> dict[str, float]:
    """Mean of the tasks of each family of the paper, for the families that are there whole."""
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
