"""A comparison as a sheet, and the comparison that a study's table asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Group

from frozencore.errors import DataError
from frozencore.tune.methods import method_name
from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.sheets.render import rich_table
from frozencore_lab.reports.sheets.sheet import Sheet, SheetCell, label, number
from frozencore_lab.reports.statistics.over_tasks import REAL_COVERAGE
from frozencore_lab.reports.tables.comparison import Comparison, TaskTable, analyse
from frozencore_lab.reports.tables.pivot import Pivot

HEADINGS = (
    "column", "mean Δ", "95 % interval", "wins", "ties", "losses",
    "Wilcoxon p", "Holm", "t-test p", "Holm (t)", "mean", "mean rank",
)  # fmt: skip


def compare(pivot: Pivot) -> tuple[Comparison | None, str]:
    """The reference column of a table against the others that are whole; and what was left out, or why there is none.

    None where the study names no reference, or the table's rows are not tasks, each once: the task is what is counted.
    """
    reference = pivot.study.study.report.reference
    if reference is None or "task" not in pivot.row_axes or len(pivot.rows) < 2 or not pivot.measure.ranked:
        return None, ""
    tasks = [row[pivot.row_axes.index("task")] for row in pivot.rows]
    if len(set(tasks)) < len(tasks):
        return None, "No comparison: a task has several rows, which are no independent ones."
    means = {
        column_key(column): {pivot.row_name(row): pivot.cells[row, column].mean for row in pivot.rows}
        for column in pivot.columns
    }
    shown = {column_key(column): pivot.column_name(column) for column in pivot.columns}
    lacking = [name for name, cells in means.items() if None in cells.values()]
    if reference in lacking:
        return None, f"No comparison: {shown[reference]} lacks runs."
    whole = {name: cells for name, cells in means.items() if name not in lacking}
    note = f"Left out, as runs are missing: {', '.join(shown[name] for name in lacking)}." if lacking else ""
    try:
        table = TaskTable(tuple(map(pivot.row_name, pivot.rows)), whole)
        return analyse(table, reference, lower_is_better=pivot.measure.lower_is_better), note
    except DataError as error:
        return None, f"No comparison: {error} {note}".rstrip()


def comparison_sheet(
    comparison: Comparison,
    *,
    name: str = "significance",
    title: str = "",
    note: str = "",
    decimals: int = 2,
    names: Mapping[str, str] | None = None,
) -> Sheet:
    """Each pair with the reference on a line; the reference's own mean and rank first.

    Wins are tasks on which the reference is better, and a difference above 0 is in its favour.

    Args:
        names: How columns are shown; by default as the methods that they are.
    """
    names = names or {column: method_name(column) for column in comparison.means}
    reference = names[comparison.reference]
    own = comparison.means[comparison.reference], comparison.mean_ranks[comparison.reference]
    first = (label(reference), *[SheetCell("")] * 9, number(own[0], decimals), number(own[1], 2))
    rows = []
    for pair in comparison.pairs:
        low, high = pair.interval
        rows.append((
            label(names[pair.other]),
            SheetCell(f"{pair.mean_difference:+.{decimals}f}", value=pair.mean_difference),
            SheetCell(f"{low:+.{decimals}f} to {high:+.{decimals}f}", value=low),
            number(pair.wins, 0), number(pair.ties, 0), number(pair.losses, 0),
            p_cell(pair.wilcoxon_p), p_cell(pair.wilcoxon_holm), p_cell(pair.t_p), p_cell(pair.t_holm),
            number(comparison.means[pair.other], decimals), number(comparison.mean_ranks[pair.other], 2),
        ))  # fmt: skip
    how = "exact" if all(pair.exact for pair in comparison.pairs) else "normal approximation beyond 100 tasks"
    better = "lower" if comparison.lower_is_better else "higher"
    explained = (
        f"{reference} against each other column over {len(comparison.tasks)} tasks, {better} is better; Δ > 0 and wins "
        f"are {reference}'s. Two-sided Wilcoxon signed-rank ({how}) and paired t, unadjusted and Holm-adjusted over "
        f"{len(comparison.pairs)}; interval by bootstrap over tasks{_too_narrow(len(comparison.tasks))}."
    )
    return Sheet(
        name, title or f"{reference} against the others", " ".join(filter(None, (explained, note))), HEADINGS,
        (first, *rows),
    )  # fmt: skip


def _too_narrow(num_tasks: int) -> str:
    real = REAL_COVERAGE.get(num_tasks)
    return (
        ""
        if real is None
        else f", which is too narrow: of {num_tasks} normal differences it holds the mean in {real:.0%}"
    )


def family_sheet(comparison: Comparison, *, name: str = "families", decimals: int = 2) -> Sheet | None:
    """Means of the paper's task families, where a table has one whole."""
    families = list(comparison.family_means[comparison.reference])
    if not families:
        return None
    rows = tuple(
        (label(method_name(column)), *(number(means[family], decimals) for family in families))
        for column, means in comparison.family_means.items()
    )
    return Sheet(name, "Means of the task families", "", ("column", *families), rows)


def comparison_view(comparison: Comparison) -> Group:
    """A comparison on a screen of 80 columns: the tests, then means, ranks and intervals, then task families."""
    decimals = 2 if max(map(abs, comparison.means.values())) >= 10 else 4  # per cent, or shares and nats
    whole = comparison_sheet(comparison, decimals=decimals)
    counts = [SheetCell("") for _ in whole.rows[:1]]
    counts += [SheetCell(f"{pair.wins}/{pair.ties}/{pair.losses}") for pair in comparison.pairs]
    tests = tuple((*line[:2], count, *line[6:10]) for line, count in zip(whole.rows, counts, strict=True))
    means = tuple((line[0], *line[10:], line[2]) for line in whole.rows)
    sheets = [
        replace(whole, headings=("column", "mean Δ", "w/t/l", *HEADINGS[6:10]), rows=tests),
        Sheet("means", "Means over the tasks", "", ("column", *HEADINGS[10:], "95 % interval of Δ"), means),
        family_sheet(comparison, decimals=decimals),
    ]
    return Group(*(rich_table(sheet) for sheet in sheets if sheet is not None))


def p_cell(value: float | None) -> SheetCell:
    """A p-value as the paper prints it: ``.0137``."""
    if value is None:
        return SheetCell("n/a", hint="the differences have no spread", is_undefined=True)
    return SheetCell("< .0001" if value < 1e-4 else f"{value:.4f}".removeprefix("0"), value=value)
