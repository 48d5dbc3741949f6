"""A report as a document: sections of tables and figures, and their campaigns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from matplotlib.figure import Figure

from frozencore_lab.campaign.results import CampaignResults, FinalRun
from frozencore_lab.reports.sheet import Sheet, csv_text, latex, markdown
from frozencore_lab.reports.tables.pivot import Pivot, means_csv, runs_csv


@dataclass(frozen=True)
class Table:
    """A sheet, its pivot if any, and a remark below it."""

    sheet: Sheet
    pivot: Pivot | None = None
    remark: str = ""

    def files(self) -> Mapping[str, str]:
        """The contents of its files, by name."""
        name, remark = self.sheet.name, f"\n{self.remark}\n" if self.remark else ""
        files = {f"{name}.md": markdown(self.sheet) + remark, f"{name}.tex": latex(self.sheet)}
        if self.pivot is None:
            return files | {f"{name}.csv": csv_text(self.sheet)}
        return files | {f"{name}.csv": means_csv(self.pivot), f"{name}.runs.csv": runs_csv(self.pivot)}


@dataclass(frozen=True)
class Drawing:
    """A figure that is drawn when it is written.

    Attributes:
        name: The name of its file, without an ending.
        alt: A description of the figure.
    """

    name: str
    alt: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Section:
    """One heading and its content.

    Attributes:
        runs: The final runs that it shows.
        main, details: Tables in reading order; the page folds the details away.
        headlines: The findings, a sentence for each table of means.
    """

    name: str
    title: str
    note: str
    runs: tuple[FinalRun, ...]
    main: tuple[Table, ...]
    details: tuple[Table, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    headlines: tuple[str, ...] = ()

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.main + self.details


@dataclass(frozen=True)
class Document:
    """A whole report; no two of its tables, and no two of its figures, have one name."""

    name: str
    about: str
    results: CampaignResults
    sections: tuple[Section, ...]

    @property
    def runs(self) -> tuple[FinalRun, ...]:
        return tuple(run for study in self.results.studies for run in study.runs)


class RunCounts(NamedTuple):
    """The numbers of done, failed and missing runs; a run of several studies counts once."""

    done: int
    failed: int
    missing: int

    def __str__(self) -> str:
        return f"{self.done} of {sum(self)} final runs done, {self.failed} failed, {self.missing} missing"


def count_runs(runs: tuple[FinalRun, ...]) -> RunCounts:
    """Count the outcomes of the runs."""
    different = {run.run_id or f"none {i}": run for i, run in enumerate(runs)}.values()
    done = sum(run.record is not None for run in different)
    failed = sum(run.record is None and run.failure is not None for run in different)
    return RunCounts(done, failed, len(different) - done - failed)


def make_document(results: CampaignResults, sections: Iterable[Section]) -> Document:
    """Make a document whose tables and figures have unique names; a repeated name is made longer.

    Otherwise the study ``a-time`` and the times of the study ``a`` would share a file.
    """
    taken: set[tuple[type, str]] = set()

    def free(one: Sheet | Drawing) -> str:
        found = one.name
        while (type(one), found) in taken:
            found += "-too"
        taken.add((type(one), found))
        return found

    def renamed(tables: Iterable[Table]) -> tuple[Table, ...]:
        return tuple(replace(table, sheet=replace(table.sheet, name=free(table.sheet))) for table in tables)

    named = tuple(
        replace(
            section,
            main=renamed(section.main),
            details=renamed(section.details),
            drawings=tuple(replace(drawing, name=free(drawing)) for drawing in section.drawings),
        )
        for section in sections
    )
    return Document(results.campaign.name, results.campaign.about, results, named)
