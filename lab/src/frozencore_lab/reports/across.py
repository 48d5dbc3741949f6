"""Combine several tables of one study: macro-averages as in the paper's cross-scale table, and counts of wins.

A study has one table for each model, and several campaigns may have the same study. A report over campaigns has each
study that compares columns over tasks and that stands in at least two campaigns under the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from frozencore.errors import ArtifactError, ConfigError
from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.document import Document, Drawing, Section, Table, make_document
from frozencore_lab.reports.figures import DRAWN, ranking_panels
from frozencore_lab.reports.labels import sentence, value_name
from frozencore_lab.reports.sheet import Sheet, SheetCell, label, missing, number
from frozencore_lab.reports.statistics import differences, wins_ties_losses
from frozencore_lab.reports.tables.averages import averages, ranked_printed
from frozencore_lab.reports.tables.pivot import Key, Measure, Pivot, measures_of, pivots
from frozencore_lab.reports.tables.pivot_sheet import average_cell

NamedPivots = Mapping[tuple[str, ...], Pivot]
"""Tables by their distinguishing values, a text for each heading."""


def has_mean(pivot: Pivot) -> bool:
    """Return whether a table has tasks, compared columns and a macro-average."""
    return pivot.row_axes == ("task",) and bool(averages(pivot))


def means_across(tables: NamedPivots, headings: Sequence[str], name: str, title: str) -> Sheet | None:
    """The macro-average of every column of every table; the best of each bold, the second best underlined.

    None for fewer than two tables, or if one has no macro-average.
    """
    if len(tables) < 2 or not all(map(has_mean, tables.values())):
        return None
    measure, columns, rows = _measure(tables), _columns(tables), []
    for labels, pivot in tables.items():
        own = averages(pivot)[0].cells
        best, second = ranked_printed({column: cell.value for column, cell in own.items()}, measure)
        row = dict(zip(headings, map(label, labels), strict=True))
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


def wins_across(tables: NamedPivots, name: str, title: str) -> Sheet | None:
    """Count, by table, the tasks on which the reference column wins, ties and loses against each other column.

    None if the tables name no common reference.
    """
    references = {pivot.report.reference for pivot in tables.values()}
    columns, measure = _columns(tables), _measure(tables)
    reference = next((column for column in columns if references == {column_key(column)}), None)
    if reference is None:
        return None
    rows = []
    for column, shown in columns.items():
        if column == reference:
            continue
        row, gained = {"column": label(shown)}, list[float]()
        for labels, pivot in tables.items():
            gains = _gains(pivot, reference, column)
            counts = wins_ties_losses(gains)
            shown_counts = SheetCell(" / ".join(map(str, counts)), value=counts[0])
            row[", ".join(labels)] = shown_counts if gains else missing("a mean is missing")
            gained += gains
        counted = dict(zip(("wins", "ties", "losses"), wins_ties_losses(gained), strict=True))
        row |= {heading: number(count, 0) for heading, count in counted.items()}
        mean = sum(gained) / len(gained) if gained else None
        shown_mean = missing() if mean is None else SheetCell(f"{mean:+.{measure.decimals + 1}f}", value=mean)
        rows.append(row | {"of": number(len(gained), 0), "mean Δ": shown_mean})
    if not rows:
        return None
    note = (
        f"{sentence(measure.title)}, {measure.better} is better; wins / ties / losses of {columns[reference]} by "
        "unrounded task means, in each table and in all. Mean Δ: the mean difference; above 0 it is better."
    )
    return Sheet.of(name, f"{title}: tasks on which {columns[reference]} is better", note, rows)


def _gains(pivot: Pivot, reference: Key, column: Key) -> list[float]:
    """The reference minus the other by task, negated if lower is better; empty if a mean is missing."""
    if not {reference, column} <= set(pivot.columns):
        return []
    own, other = (
        [mean for row in pivot.rows if (mean := pivot.cells[row, key].mean) is not None] for key in (reference, column)
    )
    if min(len(own), len(other)) < len(pivot.rows):
        return []
    sign = -1 if pivot.measure.lower_is_better else 1
    return [sign * gain for gain in differences(own, other)]


def _columns(tables: NamedPivots) -> dict[Key, str]:
    """The columns of all tables, and their labels."""
    return {column: pivot.column_name(column) for pivot in tables.values() for column in pivot.columns}


def _measure(tables: NamedPivots) -> Measure:
    return next(iter(tables.values())).measure


def across_document(campaigns: Sequence[CampaignResults]) -> Document:
    """Make the report as a document, with a section for each study.

    Raises:
        ConfigError: Two campaigns have the same name.
        ArtifactError: The campaigns have no comparable study in common.
    """
    names = [results.campaign.name for results in campaigns]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"Campaigns are told apart by their names, but {twice[0]!r} comes twice. Name each once.")
    sections = list(_sections(campaigns))
    if not sections:
        raise ArtifactError(
            f"The campaigns {', '.join(names)} share no study of tasks by columns with a mean. "
            "Report on each of them alone."
        )
    return make_document("Across campaigns", ", ".join(names), tuple(campaigns), sections)


def _sections(campaigns: Sequence[CampaignResults]) -> Iterator[Section]:
    for name in dict.fromkeys(study.name for results in campaigns for study in results.studies):
        members = [(results, study) for results in campaigns for study in results.studies if study.name == name]
        if len(members) > 1 and (section := _section(name, members)) is not None:
            yield section


def _section(name: str, members: Sequence[tuple[CampaignResults, StudyResults]]) -> Section | None:
    titles = {study.study.title for _, study in members}
    title = titles.pop() if len(titles) == 1 else sentence(name.replace("-", " "))
    notes = {study.study.note for _, study in members}
    main: list[Table] = []
    details: list[Table] = []
    drawings = []
    for i, measure in enumerate(measures_of(members[0][1])):
        tables, remark = _comparable(_named(members, measure))
        means = means_across(tables, ("model",), f"{name}-means{measure.suffix}", title)
        if means is None:
            continue
        found = [Table(means, remark=remark)]
        if (wins := wins_across(tables, f"{name}-wins{measure.suffix}", title)) is not None:
            found.append(Table(wins))
        (details if i else main).extend(found)
        shown = [
            (", ".join(labels), pivot) for labels, pivot in tables.items() if DRAWN["ranking"].has_something(pivot)
        ]
        if shown:
            draw = partial(ranking_panels, shown)
            drawings.append(Drawing(f"{name}{measure.suffix}", f"{title}: {measure.title}", draw))
    if not main:
        return None
    runs = tuple(run for _, study in members for run in study.runs)
    note = notes.pop() if len(notes) == 1 else ""
    return Section(name, title, note, runs, tuple(main), tuple(details), tuple(drawings))


def _named(members: Sequence[tuple[CampaignResults, StudyResults]], measure: Measure) -> NamedPivots:
    """The members' tables by model, and by campaign if several have the same model."""
    found = [(results.campaign.name, pivot) for results, study in members for pivot in pivots(study, measure)]
    models = Counter(_model(pivot) for _, pivot in found)
    return {
        (_model(pivot) + (f" ({campaign})" if models[_model(pivot)] > 1 else ""),): pivot for campaign, pivot in found
    }


def _model(pivot: Pivot) -> str:
    shown = {"model": pivot.study.study.axes["model"][0], **pivot.group}
    return ", ".join(value_name(axis, value) for axis, value in shown.items())


def _comparable(tables: NamedPivots) -> tuple[NamedPivots, str]:
    """The tables over the same tasks as the first, whose means can be compared; and the names of the others."""
    tasks = set(next(iter(tables.values())).rows)
    kept = {labels: pivot for labels, pivot in tables.items() if set(pivot.rows) == tasks and has_mean(pivot)}
    others = [", ".join(labels) for labels in tables if labels not in kept]
    return kept, f"Left out, because their tasks differ: {', '.join(others)}." if others else ""
