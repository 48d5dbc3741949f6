"""Differences between methods on common rows, with intervals by resampling these rows.

They show the uncertainty of each task's number, which the Wilcoxon test takes as exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from frozencore.tune.run.record import TunedRecord
from frozencore_lab.campaign.results import FinalRun
from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.labels import many
from frozencore_lab.reports.sheet import Sheet, SheetCell, interval, label, missing, number, signed
from frozencore_lab.reports.statistics import (
    NUM_ITEM_RESAMPLES,
    Gains,
    hierarchical_means,
    item_means,
    percentiles,
)
from frozencore_lab.reports.tables.comparison import Comparison
from frozencore_lab.reports.tables.pivot import ACCURACY, Key, Pivot, PivotCell
from frozencore_lab.reports.tables.significance import p_cell


@dataclass(frozen=True)
class ItemGains:
    """The reference's gains over other columns, by item.

    Attributes:
        others: Columns in which every run records its right answers on the same rows as the reference.
        by_task: An array (seeds, items, others) of −1, 0 and 1 for each row of the table.
        left_out: The remaining columns.
    """

    reference: Key
    others: tuple[Key, ...]
    by_task: dict[Key, Gains]
    left_out: tuple[Key, ...]


def item_gains(pivot: Pivot) -> tuple[ItemGains | None, str]:
    """The gains of a table's reference column; if there are none, None and the reason or an empty text.

    Needs a table of accuracy with tasks as rows, and a reference column.
    """
    reference = pivot.reference
    if pivot.measure is not ACCURACY or reference is None or pivot.row_axes != ("task",):
        return None, ""
    runs = [one.run for cell in pivot.cells.values() for one in cell.runs if one.status == "done"]
    silent = sum(_answers(run) is None for run in runs)
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
    """(seeds, items): the reference's answers minus the other's; None unless both have all seeds on the same rows."""
    theirs = {one.seed: one.run for one in other.runs}
    gains, rows = [], set()
    for own in (one.run for one in reference.runs):
        run = theirs.get(own.axes["seed"])
        answers = _answers(own), _answers(run) if run is not None else None
        if run is None or answers[0] is None or answers[1] is None or _rows(own) != _rows(run):
            return None
        if len(answers[0]) != len(answers[1]):
            return None
        gains.append(answers[0] - answers[1])
        rows.add((_rows(own), len(answers[0])))
    return np.stack(gains) if len(rows) == 1 else None


def _answers(run: FinalRun) -> NDArray[np.int8] | None:
    """1 for each scored row with a right answer, else 0; None if the record does not have it."""
    score = run.record.score if isinstance(run.record, TunedRecord) else None
    if score is None or score.correct is None:
        return None
    return np.frombuffer(score.correct.encode(), dtype=np.int8) - ord("0")


def _rows(run: FinalRun) -> str | None:
    """The hash of the rows that the run was scored on."""
    hashes = run.record.hashes if run.record is not None else None
    return hashes.evaluation if hashes is not None else None


def item_sheet(pivot: Pivot, gains: ItemGains, comparison: Comparison | None, name: str) -> Sheet:
    """Each mean difference with its interval over items; with several tasks also over tasks, and over both and seeds.

    Args:
        comparison: The comparison of the same table over its tasks, if any.
    """
    by_task = list(gains.by_task.values())
    scale, decimals, several = pivot.measure.scale, pivot.measure.decimals + 1, len(by_task) > 1
    means = scale * np.mean([gain.mean(axis=(0, 1)) for gain in by_task], axis=0)
    over_items = percentiles(scale * item_means(by_task))
    over_all = percentiles(scale * hierarchical_means(by_task)) if several else []
    pairs = {pair.other: pair for pair in comparison.pairs} if comparison else {}
    lines = []
    for i, column in enumerate(gains.others):
        line = {"column": label(pivot.column_name(column)), "mean Δ": signed(float(means[i]), decimals)}
        if comparison:
            pair = pairs.get(column_key(column))
            line["over tasks"] = interval(*pair.interval, decimals) if pair else missing()
            line["Wilcoxon p"] = p_cell(pair.wilcoxon_p) if pair else missing()
        line["over items"] = interval(*over_items[i], decimals)
        if several:
            line["over tasks, seeds and items"] = interval(*over_all[i], decimals)
        lines.append(line)
    drawn = ["of tasks"] if comparison else []
    drawn += (
        ["of items within the tasks", "of tasks, of each one's seeds and of each one's items"]
        if several
        else ["of items"]
    )
    shown, num_seeds = pivot.column_name(gains.reference), by_task[0].shape[0]
    num_items, left_out = sum(gain.shape[1] for gain in by_task), ", ".join(map(pivot.column_name, gains.left_out))
    note = (
        f"{shown} less each other column, paired on {num_items:,} scored items of {many(len(by_task), 'task')} under "
        f"{many(num_seeds, 'seed')}; Δ > 0 is {shown}'s. 95 % intervals by {NUM_ITEM_RESAMPLES:,} draws: "
        f"{'; '.join(drawn)}." + (f" Left out, as their records lack answers: {left_out}." if left_out else "")
    )
    return Sheet.of(name, f"{pivot.title}: how sure the differences are", note, lines)


def items_by_task_sheet(pivot: Pivot, gains: ItemGains, name: str) -> Sheet:
    """A sheet of the difference on each task with its interval over the task's items."""
    scale, decimals, lines = pivot.measure.scale, pivot.measure.decimals, []
    for row, gain in gains.by_task.items():
        line = {"task": label(pivot.row_name(row))}
        ends = percentiles(scale * item_means([gain]))
        for column, mean, (low, high) in zip(gains.others, scale * gain.mean(axis=(0, 1)), ends, strict=True):
            text = f"{signed(float(mean), decimals).text} [{low:+.{decimals}f}, {high:+.{decimals}f}]"
            line[pivot.column_name(column)] = SheetCell(text, value=float(mean))
        lines.append(line | {"items": number(gain.shape[1], 0)})
    note = (
        f"{pivot.column_name(gains.reference)} less each other column, with the 95 % interval over the task's items, "
        f"of the mean over seeds. Of {len(lines) * len(gains.others)} intervals some miss by chance: they are not "
        "adjusted."
    )
    return Sheet.of(name, f"{pivot.title}: differences by task", note, lines)
