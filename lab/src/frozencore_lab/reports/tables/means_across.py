"""Several tables of one study beside one another: macro-averages like the paper's cross-scale means, and counted wins.

The tables are a study's own (one a model, say), or those of several campaigns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.labels import column_name
from frozencore_lab.reports.sheets.sheet import Line, Sheet, SheetCell, label, number, sentence
from frozencore_lab.reports.statistics.over_tasks import differences, wins_ties_losses
from frozencore_lab.reports.tables.averages import averages, over_rows
from frozencore_lab.reports.tables.pivot import Key, Pivot
from frozencore_lab.reports.tables.pivot_sheet import average_cell, ranked_printed


@dataclass(frozen=True)
class NamedPivot:
    """A table and what tells it apart from the others, a text for each heading."""

    labels: tuple[str, ...]
    pivot: Pivot

    @property
    def has_mean(self) -> bool:
        """Whether it is a table of tasks by compared columns with a macro-average."""
        return self.pivot.row_axes == ("task",) and over_rows(self.pivot) and bool(averages(self.pivot))


def means_across(lines: Sequence[NamedPivot], headings: Sequence[str], name: str, title: str) -> Sheet | None:
    """The macro-average of every column of every table; the best of each bold, the second best underlined.

    None for fewer than two tables, or where one has no macro-average.
    """
    if len(lines) < 2 or not all(line.has_mean for line in lines):
        return None
    first, columns = lines[0].pivot, _columns(lines)
    rows = []
    for line in lines:
        own, decimals = averages(line.pivot)[0].cells, line.pivot.measure.decimals
        best, second = ranked_printed({column: cell.value for column, cell in own.items()}, line.pivot.measure)
        cells = [
            average_cell(own[column], decimals, best=column in best, second=column in second)
            if column in own
            else SheetCell("-", hint="not in this table")
            for column in columns
        ]
        rows.append((*map(label, line.labels), *cells))
    return Sheet(
        name,
        f"{title}: means over the tasks",
        f"{sentence(first.measure.title)}; macro-average of unrounded task means ± its standard deviation over seeds. "
        "Bold: the best; underlined: the second best.",
        (*headings, *(column_name(first.column_axes, column) for column in columns)),
        tuple(rows),
        num_labels=len(headings),
    )


def wins_across(lines: Sequence[NamedPivot], name: str, title: str) -> Sheet | None:
    """On how many tasks the reference column is better than, equal to and worse than each other one, in each table.

    None without a reference that all tables name.
    """
    references = {line.pivot.study.study.report.reference for line in lines}
    columns = {column_key(column): column for column in _columns(lines)}
    if len(references) != 1 or (reference := columns.get(str(references.pop()))) is None:
        return None
    first = lines[0].pivot
    rows = [_wins(lines, reference, column) for column in columns.values() if column != reference]
    shown = column_name(first.column_axes, reference)
    better = "lower" if first.measure.lower_is_better else "higher"
    return Sheet(
        name,
        f"{title}: tasks on which {shown} is better",
        f"{sentence(first.measure.title)}, {better} is better; wins / ties / losses of {shown}'s unrounded task means "
        "in each table and in all; the mean difference over all of them, above 0 in its favour.",
        ("column", *(", ".join(line.labels) for line in lines), "wins", "ties", "losses", "of", "mean Δ"),
        tuple(rows),
    )


def _wins(lines: Sequence[NamedPivot], reference: Key, column: Key) -> Line:
    first, total, gained = lines[0].pivot, (0, 0, 0), list[float]()
    cells = [label(column_name(first.column_axes, column))]
    for line in lines:
        gains = _gains(line.pivot, reference, column)
        if gains is None:
            cells.append(SheetCell("n/a", hint="a mean is missing"))
            continue
        counts = wins_ties_losses(gains)
        total = (total[0] + counts[0], total[1] + counts[1], total[2] + counts[2])
        gained += gains
        cells.append(SheetCell(" / ".join(map(str, counts)), value=counts[0]))
    decimals = first.measure.decimals + 1
    mean = SheetCell("n/a")
    if gained:
        mean = SheetCell(f"{sum(gained) / len(gained):+.{decimals}f}", value=sum(gained) / len(gained))
    return (*cells, *(number(count, 0) for count in (*total, sum(total))), mean)


def _gains(pivot: Pivot, reference: Key, column: Key) -> list[float] | None:
    """The reference less the other by task, turned where lower is better; None where a mean is missing."""
    pairs = []
    for row in pivot.rows:
        own, other = (pivot.cells.get((row, key)) for key in (reference, column))
        if own is None or other is None or own.mean is None or other.mean is None:
            return None
        pairs.append((own.mean, other.mean))
    sign = -1 if pivot.measure.lower_is_better else 1
    return [sign * gain for gain in differences(*zip(*pairs, strict=True))]


def _columns(lines: Sequence[NamedPivot]) -> list[Key]:
    return list(dict.fromkeys(column for line in lines for column in line.pivot.columns))
