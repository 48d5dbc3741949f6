"""Write a document as files: ``tables/``, ``figures/``, ``report.md`` and one page, ``index.html``.

The page is made from ``page.html``, a Jinja template that escapes all values and loads nothing from other places.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from frozencore.files.whole_file import write_text
from frozencore.tune.figures import save_figure
from frozencore.tune.run.record_parts import Provenance
from frozencore_lab.campaign.results import FinalRun
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.reports.document import Document, Section, Table, count_runs
from frozencore_lab.reports.labels import axis_name, full_name, sentence, value_name
from frozencore_lab.reports.sheet import Sheet, SheetCell, markdown, markdown_text

HASH_DIGITS = 16
FEW_COLUMNS = 4
"""The most columns of a table on a phone; with more, each of its lines becomes a list."""
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip


def write_document(document: Document, folder: Path) -> list[Path]:
    """Write every file of a document; the same records give the same bytes.

    ``tables/NAME.csv`` has unrounded means, for ``campaign report --table``; ``NAME.runs.csv`` has every run.

    Raises:
        ArtifactError: The folder cannot be written.
    """
    for section in document.sections:
        for drawing in section.drawings:
            save_figure(drawing.draw(), folder / "figures" / f"{drawing.name}.png")
        for table in section.tables:
            for name, content in table.files().items():
                write_text(folder / "tables" / name, content)
    write_text(folder / "report.md", report_text(document))
    write_text(folder / "index.html", document_page(document, folder / "figures"))
    return [folder / name for name in file_names(document)]


def file_names(document: Document) -> Iterator[str]:
    """The files that :func:`write_document` writes, relative to its folder."""
    for section in document.sections:
        for table in section.tables:
            yield from (f"tables/{name}" for name in table.files())
        yield from (f"figures/{drawing.name}.png" for drawing in section.drawings)
    yield from ("report.md", "index.html")


def report_text(document: Document) -> str:
    """The report as Markdown: ``report.md``."""
    parts = [f"# {markdown_text(document.name)}", document.about, f"**{count_runs(document.runs)}.**"]
    parts += ["\n".join(f"- {markdown_text(line)}" for section in document.sections for line in section.headlines)]
    for section in document.sections:
        parts += [f"## {markdown_text(section.title)}", section.note]
        parts += [f"{count_runs(section.runs)}."] if section.runs else []
        parts += [f"![{markdown_text(drawing.alt)}](figures/{drawing.name}.png)" for drawing in section.drawings]
        for table in section.tables:
            parts += [markdown(table.sheet).rstrip("\n"), table.remark]
    parts += ["## Protocol", _fenced(protocol_yaml(document.results.campaign))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _fenced(text: str) -> str:
    """Put YAML in a code block with a fence that does not occur in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}yaml\n{text}{fence}"


def document_page(document: Document, figures: Path) -> str:
    """The page's HTML.

    Args:
        figures: The folder of the figures' files.
    """
    return TEMPLATES.get_template("page.html").render(
        document=document, facts=_facts(document), source_counts=_sources(document.runs), count_runs=count_runs,
        headline=_headline, caption=_caption, runs_of=_runs_of, classes=_classes,
        protocol_yaml=protocol_yaml, sort_value=_sort_value, few_columns=FEW_COLUMNS,
        picture=lambda name: base64.b64encode((figures / f"{name}.png").read_bytes()).decode(),
    )  # fmt: skip


def _headline(section: Section, table: Table) -> tuple[str, str]:
    """A table's heading and note. The heading leaves out the section's title; if nothing is left it is the measure."""
    sheet = table.sheet
    rest = _caption(section, sheet.title)
    if rest:
        return rest, sheet.note
    heading, _, note = sheet.note.partition("; ")
    return heading, sentence(note)


def _caption(section: Section, text: str) -> str:
    return sentence(text.removeprefix(section.title).lstrip(",: "))


def _classes(sheet: Sheet, place: int, cell: SheetCell) -> str:
    words = {
        "label": place < sheet.num_labels or isinstance(cell.value, str),
        "best": cell.best,
        "second": cell.second,
        "long": len(cell.text) > 60,
    }
    return " ".join(word for word, holds in words.items() if holds)


def _sort_value(cell: SheetCell) -> str:
    return "" if cell.value is None else str(cell.value).replace("inf", "Infinity")


def _runs_of(cell: SheetCell) -> list[tuple[Any, str | None, str]]:
    """Seed, id and value of each run of a cell."""
    return [(one.seed, one.run.run_id, one.shown(".6g")) for one in cell.runs]


def _sources(runs: tuple[FinalRun, ...]) -> list[tuple[str, int]]:
    """The sources of the runs, and the number of runs of each."""
    records = {run.run_id: run.record for run in runs}.values()
    return sorted(Counter(_source(record.provenance) for record in records if record is not None).items())


def _source(source: Provenance) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    return f"commit {source.commit}; {versions}; {source.device}, {source.platform}"


def _facts(document: Document) -> dict[str, dict[str, str]]:
    """The text of the dialog of each run in a table, beside its value."""
    sheets = [table.sheet for section in document.sections for table in section.tables]
    cells = (cell for sheet in sheets for line in (*sheet.rows, *sheet.foot) for cell in line)
    shown = {one.run.run_id for cell in cells for one in cell.runs}
    return {run.run_id: _facts_of(run) for run in document.runs[::-1] if run.run_id in shown and run.run_id is not None}


def _facts_of(run: FinalRun) -> dict[str, str]:
    facts = {"run": str(run.run_id), "axes": ", ".join(full_name(*item) for item in run.axes.items())}
    if run.record is not None:
        facts |= {"options": _options(run.record.config.content()), "source": _source(run.record.provenance)}
        hashes = run.record.hashes.content() if run.record.hashes is not None else {}
        facts |= {f"{name} hash": str(value)[:HASH_DIGITS] for name, value in hashes.items()}
    elif run.failure is not None:
        facts["failure"] = f"{run.failure.reason}: {run.failure.message}"
    return facts


def _options(config: Mapping[str, Any]) -> str:
    shown = {**config, **config.get("core", {})}
    return ", ".join(
        f"{axis_name(name)} {value_name(name, value)}"
        for name, value in shown.items()
        if value is not None and name not in ("core", "data_root", "device")
    )


def protocol_yaml(campaign: Campaign) -> str:
    """A campaign's specification as YAML, without defaults."""
    content = campaign.model_dump(mode="json", exclude_defaults=True)
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110))
