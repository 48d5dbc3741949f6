"""Several tables of one study beside one another: macro-averages like the paper's cross-scale means, and counted wins.

The tables are a study's own (one a model, say), or those of several campaigns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.labels import column_name, sentence
from frozencore_lab.reports.sheet import Sheet, SheetCell, label, missing, number
from frozencore_lab.reports.statistics.over_tasks import differences, wins_ties_losses
from frozencore_lab.reports.tables.averages import averages, ranked_printed
from frozencore_lab.reports.tables.pivot import Key, Pivot
from frozencore_lab.reports.tables.pivot_sheet import average_cell


@dataclass(frozen=True)
class NamedPivot:
    """A table and what tells it apart from the others, a text for each heading."""

    labels: tuple[str, ...]
    pivot: Pivot

    @property
    def has_mean(self) -> bool:
        """Whether it is a table of tasks by compared columns with a macro-average."""
        return self.pivot.row_axes == ("task",) and bool(averages(self.pivot))


def means_across(lines: Sequence[NamedPivot], headings: Sequence[str], name: str, title: str) -> Sheet | None:
    """The macro-average of every column of every table; the best of each bold, the second best underlined.

    None for fewer than two tables, or where one has no macro-average.
    """
    if len(lines) < 2 or not all(line.has_mean for line in lines):
        return None
    measure, columns, rows = lines[0].pivot.measure, _columns(lines), []
    for line in lines:
        own = averages(line.pivot)[0].cells
        best, second = ranked_printed({column: cell.value for column, cell in own.items()}, measure)
        row = dict(zip(headings, map(label, line.labels), strict=True))
        for column, shown in columns.items():
            row[shown] = (
                average_cell(own[column], measure.decimals, best=column in best, second=column in second)
                if column in own
                else SheetCell("-", hint="not in this table")
            )
        rows.append(row)
    note = (
        f"{sentence(measure.title)}; macro-average of unrounded task means ± its standard deviation over seeds. "
        "Bold: the best; underlined: the second best."
    )
    return Sheet.of(name, f"{title}: means over the tasks", note, rows, num_labels=len(headings))


def wins_across(lines: Sequence[NamedPivot], name: str, title: str) -> Sheet | None:
    """On how many tasks the reference column is better than, equal to and worse than each other one, in each table.

    None without a reference that all tables name.
    """
    references = {line.pivot.report.reference for line in lines}
    columns, measure = _columns(lines), lines[0].pivot.measure
    reference = next((column for column in columns if references == {column_key(column)}), None)
    if reference is None:
        return None
    rows = []
    for column, shown in columns.items():
        if column == reference:
            continue
        row, gained = {"column": label(shown)}, list[float]()
        for line in lines:
            gains = _gains(line.pivot, reference, column)
            counts = wins_ties_losses(gains)
            shown_counts = SheetCell(" / ".join(map(str, counts)), value=counts[0])
            row[", ".join(line.labels)] = shown_counts if gains else missing("a mean is missing")
            gained += gains
        counted = dict(zip(("wins", "ties", "losses"), wins_ties_losses(gained), strict=True))
        row |= {heading: number(count, 0) for heading, count in counted.items()}
        mean = sum(gained) / len(gained) if gained else None
        shown_mean = missing() if mean is None else SheetCell(f"{mean:+.{measure.decimals + 1}f}", value=mean)
        rows.append(row | {"of": number(len(gained), 0), "mean Δ": shown_mean})
    if not rows:
        return None
    note = (
        f"{sentence(measure.title)}, {measure.better} is better; wins / ties / losses of {columns[reference]}'s "
        "unrounded task means in each table and in all; the mean difference over all of them, above 0 in its favour."
    )
    return Sheet.of(name, f"{title}: tasks on which {columns[reference]} is better", note, rows)


def _gains(pivot: Pivot, reference: Key, column: Key) -> list[float]:
    """The reference less the other by task, turned where lower is better; none where a mean is missing."""
    own, other = ([_mean(pivot, row, key) for row in pivot.rows] for key in (reference, column))
    pairs = [(x, y) for x, y in zip(own, other, strict=True) if x is not None and y is not None]
    if len(pairs) < len(pivot.rows):
        return []
    sign = -1 if pivot.measure.lower_is_better else 1
    return [sign * gain for gain in differences([x for x, _ in pairs], [y for _, y in pairs])]


def _mean(pivot: Pivot, row: Key, column: Key) -> float | None:
    return pivot.cells[row, column].mean if column in pivot.columns else None


def _columns(lines: Sequence[NamedPivot]) -> dict[Key, str]:
    """Every column of any of the tables, and how it is called."""
    axes = lines[0].pivot.column_axes
    return {column: column_name(axes, column) for line in lines for column in line.pivot.columns}
