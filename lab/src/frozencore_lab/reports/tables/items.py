"""Differences between methods on the rows that both were scored on: intervals by resampling those rows.

Beside the Wilcoxon test, to which a task is one number: how sure is each number, of the rows that it was measured on?
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.sheets.sheet import Sheet, SheetCell, label, many, number, signed
from frozencore_lab.reports.statistics.over_items import (
    NUM_ITEM_RESAMPLES,
    Gains,
    hierarchical_means,
    interval,
    item_means,
)
from frozencore_lab.reports.tables.averages import over_rows
from frozencore_lab.reports.tables.comparison import Comparison
from frozencore_lab.reports.tables.measures import ACCURACY
from frozencore_lab.reports.tables.pivot import Key, Pivot, PivotCell
from frozencore_lab.reports.tables.significance import p_cell


@dataclass(frozen=True)
class ItemGains:
    """What the reference gains on other columns, item by item.

    Attributes:
        others: Columns whose every run says which rows it got right, of the same rows as the reference's.
        by_task: By row of the table, an array (seeds, items, others) of −1, 0 and 1.
        left_out: The other columns.
    """

    reference: Key
    others: tuple[Key, ...]
    by_task: dict[Key, Gains]
    left_out: tuple[Key, ...]


def item_gains(pivot: Pivot) -> tuple[ItemGains | None, str]:
    """The gains of a table's reference column; None, and why if there is something to say, where there are none.

    The table shows accuracy, its rows are tasks, and its study names a reference column.
    """
    columns = {column_key(column): column for column in pivot.columns}
    reference = columns.get(str(pivot.study.study.report.reference))
    if pivot.measure is not ACCURACY or reference is None or not over_rows(pivot) or pivot.row_axes != ("task",):
        return None, ""
    runs = [run for cell in pivot.cells.values() for run in cell.runs if run.status == "done"]
    silent = sum(run.correct is None for run in runs)
    if runs and silent == len(runs):
        return None, f"No interval over items: none of the {silent} records says which rows its run got right."
    others = [column for column in pivot.columns if column != reference]
    whole: dict[Key, list[NDArray[np.int8]]] = {}
    for column in others:
        found = [_gain(pivot.cells[row, reference], pivot.cells[row, column]) for row in pivot.rows]
        known = [gain for gain in found if gain is not None]
        if len(known) == len(found):
            whole[column] = known
    if not whole:
        return None, "No interval over items: no column has all runs on the reference's rows." if runs else ""
    by_task = {
        row: np.stack([gains[i] for gains in whole.values()], axis=-1).astype(float) for i, row in enumerate(pivot.rows)
    }
    left_out = tuple(column for column in others if column not in whole)
    return ItemGains(reference, tuple(whole), by_task, left_out), ""


def _gain(reference: PivotCell, other: PivotCell) -> NDArray[np.int8] | None:
    """(seeds, items): the reference's answers less the other's; None unless both have all seeds on the same rows."""
    theirs = {run.seed: run for run in other.runs}
    pairs = [(run, theirs.get(run.seed)) for run in reference.runs]
    gains = []
    for own, run in pairs:
        if run is None or own.correct is None or run.correct is None or len(own.correct) != len(run.correct):
            return None
        if own.hashes.get("evaluation") != run.hashes.get("evaluation"):
            return None
        gains.append(_answers(own.correct) - _answers(run.correct))
    same_rows = len({len(gain) for gain in gains}) == 1 and len({run.hashes.get("evaluation") for run, _ in pairs}) == 1
    return np.stack(gains) if same_rows else None


def _answers(correct: str) -> NDArray[np.int8]:
    return np.frombuffer(correct.encode(), dtype=np.int8) - ord("0")


def item_sheet(pivot: Pivot, gains: ItemGains, comparison: Comparison | None, name: str) -> Sheet:
    """Each mean difference with its interval over items; where there are several tasks, over tasks and all at once too.

    Args:
        comparison: Of the same table over its tasks, where there is one.
    """
    by_task = list(gains.by_task.values())
    scale, decimals = pivot.measure.scale, pivot.measure.decimals + 1
    means = scale * np.mean([gain.mean(axis=(0, 1)) for gain in by_task], axis=0)
    columns = {"mean Δ": [signed(float(mean), decimals) for mean in means]}
    drawn = []
    if comparison:
        pairs = {pair.other: pair for pair in comparison.pairs}
        found = [pairs.get(column_key(column)) for column in gains.others]
        unknown = SheetCell("n/a")
        columns["over tasks"] = [_interval(pair.interval, decimals) if pair else unknown for pair in found]
        columns["Wilcoxon p"] = [p_cell(pair.wilcoxon_p) if pair else unknown for pair in found]
        drawn.append("of tasks")
    columns["over items"] = [_interval(ends, decimals) for ends in interval(scale * item_means(by_task))]
    drawn.append("of items within the tasks" if len(by_task) > 1 else "of items")
    if len(by_task) > 1:
        ends_of_all = interval(scale * hierarchical_means(by_task))
        columns["over tasks, seeds and items"] = [_interval(ends, decimals) for ends in ends_of_all]
        drawn.append("of tasks, of each one's seeds and of each one's items")
    shown = pivot.column_name(gains.reference)
    num_items, num_seeds = sum(gain.shape[1] for gain in by_task), by_task[0].shape[0]
    left_out = ", ".join(map(pivot.column_name, gains.left_out))
    return Sheet(
        name,
        f"{pivot.title}: how sure the differences are",
        f"{shown} less each other column, paired on {num_items:,} scored items of {many(len(by_task), 'task')} under "
        f"{many(num_seeds, 'seed')}; Δ > 0 is {shown}'s. 95 % intervals by {NUM_ITEM_RESAMPLES:,} draws: "
        f"{'; '.join(drawn)}." + (f" Left out, as their records lack answers: {left_out}." if left_out else ""),
        ("column", *columns),
        tuple(
            (label(pivot.column_name(column)), *cells)
            for column, *cells in zip(gains.others, *columns.values(), strict=True)
        ),
    )


def items_by_task_sheet(pivot: Pivot, gains: ItemGains, name: str) -> Sheet:
    """The difference on each task with its interval over the task's items."""
    scale, decimals = pivot.measure.scale, pivot.measure.decimals
    rows = []
    for row, gain in gains.by_task.items():
        means = scale * gain.mean(axis=(0, 1))
        intervals = interval(scale * item_means([gain]))
        cells = [
            SheetCell(
                f"{signed(float(mean), decimals).text} [{low:+.{decimals}f}, {high:+.{decimals}f}]", value=float(mean)
            )
            for mean, (low, high) in zip(means, intervals, strict=True)
        ]
        rows.append((label(pivot.row_name(row)), *cells, number(gain.shape[1], 0)))
    shown = pivot.column_name(gains.reference)
    return Sheet(
        name,
        f"{pivot.title}: differences by task",
        f"{shown} less each other column, with the 95 % interval over the task's items, of the mean over seeds. Of "
        f"{len(rows) * len(gains.others)} intervals some miss by chance: they are not adjusted.",
        ("task", *map(pivot.column_name, gains.others), "items"),
        tuple(rows),
    )


def _interval(ends: tuple[float, float], decimals: int) -> SheetCell:
    low, high = ends
    return SheetCell(f"{low:+.{decimals}f} to {high:+.{decimals}f}", value=low)
