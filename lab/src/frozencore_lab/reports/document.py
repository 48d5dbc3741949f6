"""A report before it is files: sections of tables and figures, the campaigns that they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from frozencore_lab.campaign.results import CampaignResults, FinalRun
from frozencore_lab.reports.labels import free_name
from frozencore_lab.reports.sheets.sheet import Sheet
from frozencore_lab.reports.tables.pivot import Pivot


@dataclass(frozen=True)
class Table:
    """A sheet, the pivot that it shows if any, and a remark to stand below it."""

    sheet: Sheet
    pivot: Pivot | None = None
    remark: str = ""


@dataclass(frozen=True)
class Drawing:
    """A figure that is drawn when it is written.

    Attributes:
        name: Of its file, without an ending.
        alt: What it shows, in words.
        wide: It takes a page's whole width.
    """

    name: str
    alt: str
    draw: Callable[[], Figure]
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """One heading with what belongs below it.

    Attributes:
        runs: The final runs that it shows.
        main, details: Tables in the order of reading; the page folds the details away.
    """

    name: str
    title: str
    note: str
    runs: tuple[FinalRun, ...]
    main: tuple[Table, ...]
    details: tuple[Table, ...] = ()
    drawings: tuple[Drawing, ...] = ()

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.main + self.details


@dataclass(frozen=True)
class Document:
    """A whole report; no two of its tables, and no two of its figures, have one name."""

    name: str
    about: str
    campaigns: tuple[CampaignResults, ...]
    sections: tuple[Section, ...]

    @property
    def runs(self) -> tuple[FinalRun, ...]:
        return tuple(run for campaign in self.campaigns for study in campaign.studies for run in study.runs)


@dataclass(frozen=True)
class RunCounts:
    """Runs that are done, failed, and missing; a run that several studies ask for counts once."""

    done: int
    failed: int
    missing: int

    def __str__(self) -> str:
        total = self.done + self.failed + self.missing
        return f"{self.done} of {total} final runs done, {self.failed} failed, {self.missing} missing"


def count_runs(runs: tuple[FinalRun, ...]) -> RunCounts:
    """What became of them."""
    different = {run.run_id or f"none {i}": run for i, run in enumerate(runs)}.values()
    done = sum(run.record is not None for run in different)
    failed = sum(run.record is None and run.failure is not None for run in different)
    return RunCounts(done, failed, len(different) - done - failed)


def make_document(
    name: str, about: str, campaigns: tuple[CampaignResults, ...], sections: Iterable[Section]
) -> Document:
    """A document whose tables and figures have names of their own: a later one of a taken name gets a longer one."""
    tables: set[str] = set()
    figures: set[str] = set()

    def renamed(table: Table) -> Table:
        return replace(table, sheet=replace(table.sheet, name=free_name(table.sheet.name, tables)))

    return Document(
        name,
        about,
        campaigns,
        tuple(
            replace(
                section,
                main=tuple(map(renamed, section.main)),
                details=tuple(map(renamed, section.details)),
                drawings=tuple(replace(one, name=free_name(one.name, figures)) for one in section.drawings),
            )
            for section in sections
        ),
    )
