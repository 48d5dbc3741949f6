"""A document as files: ``tables/``, ``figures/``, ``report.md`` and one page, ``index.html``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from frozencore.cli.figure_style import save_figure
from frozencore.files.whole_file import write_text
from frozencore_lab.reports.document import Document, count_runs
from frozencore_lab.reports.page import document_page, protocol_yaml
from frozencore_lab.reports.render import markdown, markdown_text


def write_document(document: Document, folder: Path) -> list[Path]:
    """Write every file of a document; the same records give the same bytes.

    Raises:
        ArtifactError: The folder cannot be written.
    """
    for section in document.sections:
        for drawing in section.drawings:
            save_figure(drawing.draw(), folder / "figures" / f"{drawing.name}.png")
        for table in section.tables:
            for name, content in table.files().items():
                write_text(folder / "tables" / name, content)
    write_text(folder / "report.md", _markdown(document))
    write_text(folder / "index.html", document_page(document, folder / "figures"))
    return [folder / name for name in file_names(document)]


def file_names(document: Document) -> Iterator[str]:
    """The files that :func:`write_document` writes, relative to its folder."""
    for section in document.sections:
        for table in section.tables:
            yield from (f"tables/{name}" for name in table.files())
        yield from (f"figures/{drawing.name}.png" for drawing in section.drawings)
    yield from ("report.md", "index.html")


def _markdown(document: Document) -> str:
    parts = [f"# {markdown_text(document.name)}", document.about, f"**{count_runs(document.runs)}.**"]
    parts += ["\n".join(f"- {markdown_text(line)}" for section in document.sections for line in section.headlines)]
    for section in document.sections:
        parts += [f"## {markdown_text(section.title)}", section.note]
        parts += [f"{count_runs(section.runs)}."] if section.runs else []
        parts += [f"![{markdown_text(drawing.alt)}](figures/{drawing.name}.png)" for drawing in section.drawings]
        for table in section.tables:
            parts += [markdown(table.sheet).rstrip("\n"), table.remark]
    for results in document.campaigns:
        title = "Protocol" if len(document.campaigns) == 1 else f"Protocol of {results.campaign.name}"
        parts += [f"## {markdown_text(title)}", _fenced(protocol_yaml(results.campaign))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _fenced(text: str) -> str:
    """YAML in a block that nothing in it ends."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}yaml\n{text}{fence}"
