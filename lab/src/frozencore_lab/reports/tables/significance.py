"""Make the comparison of a study's table, and show a comparison as a sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Group

from frozencore.errors import DataError
from frozencore.tune.methods import method_name
from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.labels import axis_name, sentence, value_name
from frozencore_lab.reports.sheet import Sheet, SheetCell, interval, label, missing, number, rich_table, signed
from frozencore_lab.reports.statistics import REAL_COVERAGE, adjusted, paired_difference
from frozencore_lab.reports.tables.comparison import Comparison, Pair, TaskTable, analyse
from frozencore_lab.reports.tables.pivot import Pivot


def compare(pivot: Pivot) -> tuple[Comparison | None, str]:
    """Compare a table's reference column with the other complete columns; also return a remark on what is left out.

    None if the study has no reference, or the rows are not tasks, each once, because tasks are the unit of replication.
    """
    reference = pivot.report.reference
    if reference is None or "task" not in pivot.row_axes or len(pivot.rows) < 2 or not pivot.measure.ranked:
        return None, ""
    if len({row[pivot.row_axes.index("task")] for row in pivot.rows}) < len(pivot.rows):
        return None, "No comparison: a task has several rows, which are no independent ones."
    rows, shown = {row: pivot.row_name(row) for row in pivot.rows}, names_of(pivot)
    means = {
        column_key(column): {name: pivot.cells[row, column].mean for row, name in rows.items()}
        for column in pivot.columns
    }
    lacking = [name for name, cells in means.items() if None in cells.values()]
    if reference in lacking:
        return None, f"No comparison: {shown[reference]} lacks runs."
    whole = {name: cells for name, cells in means.items() if name not in lacking}
    note = f"Left out, as runs are missing: {', '.join(shown[name] for name in lacking)}." if lacking else ""
    try:
        table = TaskTable(tuple(rows.values()), whole)
        return analyse(table, reference, lower_is_better=pivot.measure.lower_is_better), note
    except DataError as error:
        return None, f"No comparison: {error} {note}".rstrip()


def names_of(pivot: Pivot) -> dict[str, str]:
    """The labels of a table's columns, by their names in a comparison."""
    return {column_key(column): pivot.column_name(column) for column in pivot.columns}


def comparison_sheet(
    comparison: Comparison,
    *,
    name: str = "significance",
    title: str = "",
    note: str = "",
    decimals: int = 2,
    names: Mapping[str, str] | None = None,
) -> Sheet:
    """A line for each comparison with the reference; the reference's own mean and rank come first.

    Wins are tasks on which the reference is better; a positive difference favours it.

    Args:
        names: The labels of columns; by default the labels of methods.
    """
    names = names or {column: method_name(column) for column in comparison.means}
    pairs = {pair.other: pair for pair in comparison.pairs}
    lines = [
        {
            "column": label(names[column]),
            **_tests(pairs.get(column), decimals),
            "mean": number(comparison.means[column], decimals),
            "mean rank": number(comparison.mean_ranks[column], 2),
        }
        for column in (comparison.reference, *pairs)
    ]
    reference, num_tasks = names[comparison.reference], len(comparison.tasks)
    how = "exact" if all(pair.exact for pair in comparison.pairs) else "normal approximation beyond 100 tasks"
    better, real = "lower" if comparison.lower_is_better else "higher", REAL_COVERAGE.get(num_tasks)
    narrow = f", which is too narrow: of {num_tasks} normal differences it holds the mean in {real:.0%}" if real else ""
    explained = (
        f"{reference} against each other column over {num_tasks} tasks, {better} is better; Δ > 0 and wins "
        f"are {reference}'s. Two-sided Wilcoxon signed-rank ({how}) and paired t, unadjusted and Holm-adjusted over "
        f"{len(comparison.pairs)}; interval by bootstrap over tasks{narrow}."
    )
    return Sheet.of(name, title or f"{reference} against the others", " ".join(filter(None, (explained, note))), lines)


def _tests(pair: Pair | None, decimals: int) -> dict[str, SheetCell]:
    """The statistics of a comparison by heading; empty cells for the reference itself."""
    headings = ("mean Δ", "95 % interval", "wins", "ties", "losses", "Wilcoxon p", "Holm", "t-test p", "Holm (t)")
    if pair is None:
        return dict.fromkeys(headings, SheetCell(""))
    difference = SheetCell(f"{pair.mean_difference:+.{decimals}f}", value=pair.mean_difference)
    counts = (number(count, 0) for count in (pair.wins, pair.ties, pair.losses))
    tests = map(p_cell, (pair.wilcoxon_p, pair.wilcoxon_holm, pair.t_p, pair.t_holm))
    return dict(zip(headings, (difference, interval(*pair.interval, decimals), *counts, *tests), strict=True))


def differences_sheet(pivot: Pivot, name: str) -> Sheet | None:
    """A line for each row and column beside the reference, over seeds and rows; None without anything to compare.

    Holm's adjustment is over the columns of one row.
    """
    lines, over = [], set[str]()
    if pivot.reference is None or not pivot.measure.ranked:
        return None
    decimals = pivot.measure.decimals + 1
    for row in pivot.rows:
        own = {column: pivot.cells[row, column].scored(pivot.measure) for column in pivot.columns}
        base = own.pop(pivot.reference)
        whole = {column: runs for column, runs in own.items() if runs and base and runs.keys() == base.keys()}
        found = adjusted([paired_difference([*runs.values()], [*(base or {}).values()]) for runs in whole.values()])
        labels = {
            axis_name(axis): label(value_name(axis, value)) for axis, value in zip(pivot.row_axes, row, strict=True)
        }
        for column, one in zip(whole, found, strict=True):
            if one.half is None:
                continue
            over.add(one.over)
            lines.append({
                **labels,
                "column": label(pivot.column_name(column)),
                "Δ": signed(one.mean, decimals),
                "95 % interval": interval(one.mean - one.half, one.mean + one.half, decimals),
                "p": p_cell(one.p),
                "Holm": p_cell(one.holm),
            })  # fmt: skip
    if not lines:
        return None
    reference = pivot.column_name(pivot.reference)
    note = (
        f"{sentence(pivot.measure.title)}: each column less {reference}, paired by seed; bootstrap over "
        f"{' or '.join(sorted(over))}, with Student's t for few seeds; Holm over the columns of a line's row."
    )
    if "seeds" in over:
        note += " Scores that a record does not hold by row are compared over seeds alone."
    return Sheet.of(
        name, f"{pivot.title}: differences from {reference}", note, lines, num_labels=len(pivot.row_axes) + 1
    )


def family_sheet(comparison: Comparison, *, decimals: int = 2) -> Sheet | None:
    """A sheet of means of the paper's complete task families; None if there are none."""
    if not comparison.family_means[comparison.reference]:
        return None
    lines = (
        {"column": label(method_name(column)), **{family: number(mean, decimals) for family, mean in means.items()}}
        for column, means in comparison.family_means.items()
    )
    return Sheet.of("families", "Means of the task families", "", lines)


def comparison_view(comparison: Comparison) -> Group:
    """Show a comparison on 80 columns: the tests, then means, ranks and intervals, then task families."""
    decimals = 2 if max(map(abs, comparison.means.values())) >= 10 else 4  # per cent, or shares and nats
    whole = comparison_sheet(comparison, decimals=decimals)
    counts = [SheetCell("/".join(cell.text for cell in line[3:6] if cell.text)) for line in whole.rows]
    tests = tuple((*line[:2], count, *line[6:10]) for line, count in zip(whole.rows, counts, strict=True))
    means = tuple((line[0], *line[10:], line[2]) for line in whole.rows)
    sheets = [
        replace(whole, headings=(*whole.headings[:2], "w/t/l", *whole.headings[6:10]), rows=tests),
        Sheet("means", "Means over the tasks", "", ("column", *whole.headings[10:], "95 % interval of Δ"), means),
        family_sheet(comparison, decimals=decimals),
    ]
    return Group(*(rich_table(sheet) for sheet in sheets if sheet is not None))


def p_cell(value: float | None) -> SheetCell:
    """A cell with a p-value in the paper's form: ``.0137``."""
    if value is None:
        return missing("the differences have no spread", is_undefined=True)
    return SheetCell("< .0001" if value < 1e-4 else f"{value:.4f}".removeprefix("0"), value=value)
