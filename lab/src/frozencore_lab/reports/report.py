"""The report of a campaign: a document of sections, written as tables, figures, report.md and one page, index.html.

The page is made from page.html, a Jinja template that escapes all values and loads nothing from other places.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from frozencore.files.atomic_write import write_text
from frozencore.files.strict_yaml import as_yaml
from frozencore.tune.figures import save_figure
from frozencore.tune.provenance import Provenance
from frozencore_lab.campaign.results import CampaignResults, FinalRun, StudyResults
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.reports.comparison import compare, comparison_sheet, differences_sheet, names_of
from frozencore_lab.reports.costs import state_sheet, study_costs, time_sheet
from frozencore_lab.reports.figures import Drawing, study_drawings
from frozencore_lab.reports.pivot import Pivot, averages, column_averages, means_csv, measures_of, pivots, runs_csv
from frozencore_lab.reports.setup import data_sheet, hyper_parameter_sheet, information_sheet
from frozencore_lab.reports.sheet import (
    Sheet,
    SheetCell,
    csv_text,
    latex,
    markdown,
    markdown_text,
    sentence,
    slug,
)
from frozencore_lab.reports.tables import best_sheet, pivot_sheet, search_sheet, tradeoff_sheet


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
    different = {run.run_id or f"none {i}": run for i, run in enumerate(runs)}.values()
    done = sum(run.record is not None for run in different)
    failed = sum(run.record is None and run.failure is not None for run in different)
    return RunCounts(done, failed, len(different) - done - failed)


def campaign_document(results: CampaignResults) -> Document:
    """Make the report as a document: the studies and the setup.

    A name that two tables or two figures have is made longer in the second: otherwise the study ``a-time`` and the
    times of the study ``a`` would share a file.
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

    sections = []
    for one in (*map(study_section, results.studies), setup_section(results)):
        drawings = tuple(replace(drawing, name=free(drawing)) for drawing in one.drawings)
        sections.append(replace(one, main=renamed(one.main), details=renamed(one.details), drawings=drawings))
    return Document(results.campaign.name, results.campaign.about, results, tuple(sections))


def setup_section(results: CampaignResults) -> Section:
    """Describe the setup from the code: data sets, options, and the inputs of constructors."""
    campaign = results.campaign
    sheets = (data_sheet(campaign), hyper_parameter_sheet(results), information_sheet(campaign))
    return Section("set-up", "Set-up", "", (), tuple(Table(sheet) for sheet in sheets if sheet is not None))


def study_section(results: StudyResults) -> Section:
    """Make the section of a study: tables, comparisons, costs, choices of its search, figures."""
    main: list[Table] = []
    details: list[Table] = []
    headlines: list[str] = []
    study = results.study
    for i, measure in enumerate(measures_of(results)):
        first = details if i and measure.ranked else main
        for pivot in pivots(results, measure):
            first += _pivot_tables(pivot, pivot.name + measure.suffix)
            headlines += [] if i else _headline(pivot)
            if (apart := differences_sheet(pivot, f"{pivot.name}{measure.suffix}-differences")) is not None:
                (first if len(pivot.rows) == 1 and not study.kind.is_alone else details).append(Table(apart))
    for costs in study_costs(results):
        name, alone = f"{results.name}{slug(costs.group)}", study.kind.is_alone
        sheets = (state_sheet(costs, f"{name}-state"), time_sheet(costs, f"{name}-time", alone=alone))
        (main if alone else details).extend(map(Table, sheets))
    if results.choices:
        details.append(Table(search_sheet(results)))
    drawings = tuple(study_drawings(results))
    return Section(
        results.name, study.title, study.note, results.runs, tuple(main), tuple(details), drawings, tuple(headlines)
    )


def _pivot_tables(pivot: Pivot, name: str) -> Iterator[Table]:
    """A pivot's own table, further ones, and its comparison with the reference."""
    comparison, remark = compare(pivot)
    yield Table(pivot_sheet(pivot, name), pivot, "" if comparison else remark)
    if "state" in pivot.report.figures:
        yield Table(tradeoff_sheet(pivot, f"{name}-tradeoff"))
    if pivot.report.best:
        yield Table(best_sheet(pivot, f"{name}-best"))
    if comparison is not None:
        yield Table(
            comparison_sheet(
                comparison, name=f"{name}-significance", title=f"{pivot.title}: significance ({pivot.measure.title})",
                note=remark, decimals=pivot.measure.decimals + 1, names=names_of(pivot),
            )
        )  # fmt: skip


def _headline(pivot: Pivot) -> Iterator[str]:
    """Name the columns with the best and the second best mean over the tasks, with standard deviations over seeds.

    A table of one task has its values in place of means.
    """
    upright, measure = pivot.upright, pivot.measure
    lines, of = averages(upright), "mean over the tasks"
    cells = lines[0].cells if lines else {}
    if len(upright.rows) == 1:
        cells, of = column_averages(upright), upright.row_name(upright.rows[0])
    values = {column: one.value for column, one in cells.items() if one.value is not None}
    if not measure.ranked or len(values) < 2:
        return
    first, second, *_ = sorted(values, key=lambda column: values[column], reverse=not measure.lower_is_better)
    shown = [f"{values[one]:.{measure.decimals}f}" for one in (first, second)]
    best, next_one = (
        f"{upright.column_name(one)} {value}"
        + ("" if cells[one].std is None else f" ± {cells[one].std:.{measure.decimals}f}")
        for one, value in zip((first, second), shown, strict=True)
    )
    then = " and" if shown[0] == shown[1] else ", then"
    yield f"{pivot.title}: {best}{then} {next_one} ({measure.title}, {of})."


FEW_COLUMNS = 4
"""The most columns of a table on a phone; with more, each of its lines becomes a list."""
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip


def write_document(document: Document, folder: Path) -> list[Path]:
    """Write every file of a document and return their paths; the same records give the same bytes.

    ``tables/NAME.csv`` has unrounded means, for ``campaign report --table``; ``NAME.runs.csv`` has every run.

    Raises:
        ArtifactError: The folder cannot be written.
    """
    written = []
    for section in document.sections:
        for table in section.tables:
            for name, content in table.files().items():
                written.append(folder / "tables" / name)
                write_text(written[-1], content)
        for drawing in section.drawings:
            written.append(folder / "figures" / f"{drawing.name}.png")
            save_figure(drawing.draw(), written[-1])
    pages = {"report.md": report_text(document), "index.html": document_page(document, folder / "figures")}
    for name, content in pages.items():
        written.append(folder / name)
        write_text(written[-1], content)
    return written


def report_text(document: Document) -> str:
    """The report as Markdown: ``report.md``."""
    parts = [f"# {markdown_text(document.name)}", document.about, f"**{count_runs(document.runs)}.**"]
    parts += ["\n".join(f"- {markdown_text(line)}" for section in document.sections for line in section.headlines)]
    for section in document.sections:
        parts += [f"## {markdown_text(section.title)}", section.note]
        parts += [f"{count_runs(section.runs)}."] if section.runs else []
        for drawing in section.drawings:
            parts += [f"![{markdown_text(drawing.alt)}](figures/{drawing.name}.png)", markdown_text(drawing.remark)]
        for table in section.tables:
            parts += [markdown(table.sheet).rstrip("\n"), table.remark]
    protocol, fence = protocol_yaml(document.results.campaign), "```"
    while fence in protocol:
        fence += "`"
    parts += ["## Protocol", f"{fence}yaml\n{protocol}{fence}"]
    return "\n\n".join(filter(None, parts)) + "\n"


def document_page(document: Document, figures: Path) -> str:
    """The page's HTML, with the pictures of a folder of figures."""
    records = {run.run_id: run.record for run in document.runs if run.record is not None}.values()
    return TEMPLATES.get_template("page.html").render(
        document=document, count_runs=count_runs, caption=_caption,
        source_counts=sorted(Counter(_source(record.provenance) for record in records).items()), classes=_classes,
        sort_value=lambda cell: "" if cell.value is None else str(cell.value).replace("inf", "Infinity"),
        protocol_yaml=protocol_yaml, few_columns=FEW_COLUMNS,
        picture=lambda name: base64.b64encode((figures / f"{name}.png").read_bytes()).decode(),
    )  # fmt: skip


def _caption(section: Section, text: str) -> str:
    """The title of a table or figure without its section's."""
    return sentence(text.removeprefix(section.title).lstrip(",: "))


def _classes(sheet: Sheet, place: int, cell: SheetCell) -> str:
    is_label = place < sheet.num_labels or isinstance(cell.value, str)
    words = {"label": is_label, "best": cell.best, "long": len(cell.text) > 60}
    return " ".join(word for word, holds in words.items() if holds)


def _source(source: Provenance) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    return f"commit {source.commit}; {versions}; {source.device}, {source.platform}"


def protocol_yaml(campaign: Campaign) -> str:
    """A campaign's specification as YAML, without defaults."""
    content = campaign.model_dump(mode="json", exclude_defaults=True)
    return as_yaml(content)
