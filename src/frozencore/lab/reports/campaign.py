"""The report of a campaign, whole from its records: tables, figures, ``report.md`` and one page, ``index.html``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from frozencore.lab.campaign.results import CampaignResults
from frozencore.lab.reports.campaign_page import campaign_page
from frozencore.lab.reports.labels import free_name
from frozencore.lab.reports.protocol import protocol_yaml
from frozencore.lab.reports.render import csv_text, latex, markdown, means_csv, runs_csv
from frozencore.lab.reports.study_figures import draw_study
from frozencore.lab.reports.study_report import StudyReport, Table, study_report, tally
from frozencore.whole_file import write_text


def write_report(results: CampaignResults, folder: Path) -> list[Path]:
    """Write ``tables/*.md``, ``*.tex`` and ``*.csv``, ``figures/*.png``, ``report.md`` and ``index.html``.

    A table of a study has its unrounded means in ``NAME.csv``, which ``campaign report --table`` reads, and each of its
    runs in ``NAME.runs.csv``. The same records give the same bytes.

    Raises:
        ArtifactError: The folder cannot be written.
    """
    reports = _distinct([study_report(study) for study in results.studies])
    written = [path for report in reports for table in report.tables for path in _write_table(table, folder / "tables")]
    drawn: set[str] = set()
    figures = {study.name: draw_study(study, folder / "figures", drawn) for study in results.studies}
    written += [path for found in figures.values() for path, _ in found]
    write_text(folder / "report.md", _markdown(results, reports, figures))
    write_text(folder / "index.html", campaign_page(results, reports, figures))
    return [*written, folder / "report.md", folder / "index.html"]


def _distinct(reports: list[StudyReport]) -> list[StudyReport]:
    """The same, with each table's files under a name of their own."""
    taken: set[str] = set()

    def renamed(table: Table) -> Table:
        return replace(table, sheet=replace(table.sheet, name=free_name(table.sheet.name, taken)))

    return [
        replace(report, main=tuple(map(renamed, report.main)), details=tuple(map(renamed, report.details)))
        for report in reports
    ]


def _write_table(table: Table, folder: Path) -> Iterator[Path]:
    sheet, pivot = table.sheet, table.pivot
    contents = {
        f"{sheet.name}.md": markdown(sheet) + (f"\n{table.remark}\n" if table.remark else ""),
        f"{sheet.name}.tex": latex(sheet),
        f"{sheet.name}.csv": csv_text(sheet) if pivot is None else means_csv(pivot),
    }
    if pivot is not None:
        contents[f"{sheet.name}.runs.csv"] = runs_csv(pivot)
    for name, content in contents.items():
        write_text(folder / name, content)
        yield folder / name


def _markdown(results: CampaignResults, reports: list[StudyReport], figures: dict[str, list[tuple[Path, str]]]) -> str:
    campaign = results.campaign
    cells = tuple(cell for study in results.studies for cell in study.cells)
    parts = [f"# {campaign.name}", *([campaign.about] if campaign.about else []), f"**{tally(cells)}.**"]
    for report in reports:
        study = report.results.study
        parts += [f"## {study.title}", *([study.note] if study.note else []), f"{tally(report.results.cells)}."]
        parts += [f"![{alt}](figures/{path.name})" for path, alt in figures[report.results.name]]
        for table in report.tables:
            parts += [markdown(table.sheet).rstrip("\n"), *([table.remark] if table.remark else [])]
    parts += ["## Protocol", f"```yaml\n{protocol_yaml(campaign)}```"]
    return "\n\n".join(parts) + "\n"
