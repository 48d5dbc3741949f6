"""A document as files: ``tables/``, ``figures/``, ``report.md`` and one page, ``index.html``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from frozencore.cli.figure_style import save_figure
from frozencore.files.whole_file import write_text
from frozencore_lab.reports.document import Document, Table, count_runs
from frozencore_lab.reports.pages.document_page import document_page
from frozencore_lab.reports.pages.protocol import protocol_yaml
from frozencore_lab.reports.sheets.render import csv_text, latex, markdown, markdown_text
from frozencore_lab.reports.tables.pivot_csv import means_csv, runs_csv


def write_document(document: Document, folder: Path) -> list[Path]:
    """Write every file of a document; the same records give the same bytes.

    Raises:
        ArtifactError: The folder cannot be written.
    """
    written = []
    for section in document.sections:
        for table in section.tables:
            for name, content in _table_files(table).items():
                write_text(folder / "tables" / name, content)
                written.append(folder / "tables" / name)
    figures = {}
    for section in document.sections:
        for drawing in section.drawings:
            figures[drawing.name] = folder / "figures" / f"{drawing.name}.png"
            save_figure(drawing.draw(), figures[drawing.name])
    write_text(folder / "report.md", _markdown(document))
    write_text(folder / "index.html", document_page(document, figures))
    return [*written, *figures.values(), folder / "report.md", folder / "index.html"]


def file_names(document: Document) -> Iterator[str]:
    """The files that :func:`write_document` writes, relative to its folder."""
    for section in document.sections:
        for table in section.tables:
            yield from (f"tables/{name}" for name in _table_files(table))
        yield from (f"figures/{drawing.name}.png" for drawing in section.drawings)
    yield from ("report.md", "index.html")


def _table_files(table: Table) -> Mapping[str, str]:
    sheet, pivot = table.sheet, table.pivot
    contents = {
        f"{sheet.name}.md": markdown(sheet) + (f"\n{table.remark}\n" if table.remark else ""),
        f"{sheet.name}.tex": latex(sheet),
        f"{sheet.name}.csv": csv_text(sheet) if pivot is None else means_csv(pivot),
    }
    return contents if pivot is None else contents | {f"{sheet.name}.runs.csv": runs_csv(pivot)}


def _markdown(document: Document) -> str:
    parts = [
        f"# {markdown_text(document.name)}",
        *([document.about] if document.about else []),
        f"**{count_runs(document.runs)}.**",
    ]
    for section in document.sections:
        parts += [f"## {markdown_text(section.title)}", *([section.note] if section.note else [])]
        parts += [f"{count_runs(section.runs)}."] if section.runs else []
        parts += [f"![{markdown_text(drawing.alt)}](figures/{drawing.name}.png)" for drawing in section.drawings]
        for table in section.tables:
            parts += [markdown(table.sheet).rstrip("\n"), *([table.remark] if table.remark else [])]
    for results in document.campaigns:
        title = "Protocol" if len(document.campaigns) == 1 else f"Protocol of {results.campaign.name}"
        parts += [f"## {markdown_text(title)}", _fenced(protocol_yaml(results.campaign))]
    return "\n\n".join(parts) + "\n"


def _fenced(text: str) -> str:
    """YAML in a block that nothing in it ends."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}yaml\n{text}{fence}"
