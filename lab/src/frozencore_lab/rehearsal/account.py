"""What a report holds and lacks: every cell of every table, every figure, every run that has no result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frozencore.tune.run.record import Failure
from frozencore_lab.campaign.plan import Planned
from frozencore_lab.campaign.store import Store
from frozencore_lab.reports.document import Document, Section
from frozencore_lab.reports.figures import asked_figures
from frozencore_lab.reports.sheet import Line, Sheet, SheetCell


@dataclass(frozen=True)
class Lack:
    """Something that a report should show and cannot.

    Attributes:
        study: The section.
        where: Table, row and column; or the figure, or the run.
    """

    study: str
    where: str
    why: str


@dataclass(frozen=True)
class StudyAccount:
    """One section of a report, counted."""

    name: str
    title: str
    num_tables: int
    num_figures: int
    filled: int
    lacks: tuple[Lack, ...]


def account_of(document: Document, planned: Sequence[Planned], store: Store) -> list[StudyAccount]:
    """Count a report's cells and figures.

    Args:
        planned: The campaign's runs: a trial that failed empties no cell, but chooses among fewer.
    """
    studies = {study.name: study.study for campaign in document.campaigns for study in campaign.studies}
    accounts = []
    for section in document.sections:
        lacks = list(_empty_cells(section))
        asked = asked_figures(studies[section.name]) if section.name in studies else ()
        if asked and not section.drawings:
            lacks.append(Lack(section.name, f"figure: {' and '.join(asked)}", "there is nothing to draw"))
        lacks += _failed_trials(section.name, planned, store)
        filled = sum(not cell.is_empty for table in section.tables for _, _, cell in _numbers(table.sheet))
        accounts.append(
            StudyAccount(section.name, section.title, len(section.tables), len(section.drawings), filled, tuple(lacks))
        )
    return accounts


def _numbers(sheet: Sheet) -> Iterator[tuple[Line, int, SheetCell]]:
    """The cells of a sheet that are neither labels nor left blank."""
    for line in (*sheet.rows, *sheet.foot):
        for place, cell in enumerate(line):
            if place >= sheet.num_labels and cell.text:
                yield line, place, cell


def _empty_cells(section: Section) -> Iterator[Lack]:
    for table in section.tables:
        sheet = table.sheet
        for line, place, cell in _numbers(sheet):
            if cell.is_empty:
                row = ", ".join(label.text for label in line[: sheet.num_labels] if label.text)
                messages = [run.message for run in cell.runs if run.value is None and run.message]
                why = messages[0] if messages else cell.hint or "no reason is known"
                yield Lack(section.name, f"{sheet.name}: {row}, {sheet.headings[place]}", why)
        if table.remark:
            yield Lack(section.name, sheet.name, table.remark)


def _failed_trials(study: str, planned: Sequence[Planned], store: Store) -> Iterator[Lack]:
    for run in planned:
        failure = store.outcome(run.job.id) if run.job and run.study == study and run.phase == "search" else None
        if isinstance(failure, Failure):
            axes = ", ".join(f"{name} {value}" for name, value in run.axes.items() if name != "model")
            yield Lack(study, f"trial: {axes}", f"{failure.reason}: {failure.message}")
