"""The page of a report: status, tables that sort and whose cells tell their runs, figures, protocol, provenance."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from frozencore.tune.run.record_parts import Provenance
from frozencore_lab.campaign.results import FinalRun
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.reports.document import Document, Section, Table, count_runs
from frozencore_lab.reports.labels import axis_name, full_name, value_name
from frozencore_lab.reports.pages.html_parts import html_document, image
from frozencore_lab.reports.pages.protocol import protocol_yaml, studies_axes
from frozencore_lab.reports.sheets.html_table import html_table
from frozencore_lab.reports.sheets.sheet import SeedValue

STYLE = """
body { max-width: 96rem; } th, td { padding: .3rem .5rem; }
table { border-collapse: separate; border-spacing: 0; } .figures { display: flex; flex-wrap: wrap; gap: 0 1rem; }
.figures figure { flex: 0 1 34rem; margin: .5rem 0; } .figures img { width: 100%; }
.figures figure.wide { flex-basis: 100%; }
h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; } h3 { margin-bottom: .2rem; }
li, p, h1, h2, h3, summary { overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1rem; } .status { font-weight: 600; }
.status.partial::before { content: "⚠ "; } p.note { margin: .2rem 0 .5rem; font-size: .9rem; }
thead th { white-space: normal; vertical-align: bottom; } tbody tr:hover { background: var(--tint); }
tfoot td { background: var(--tint); } tfoot tr:first-child td { border-top: 2px solid var(--line); }
td.label { max-width: 40rem; } td.long { white-space: normal; min-width: 18rem; }
td.best { font-weight: 700; } td.second { text-decoration: underline; }
td small { color: var(--soft); font-weight: 400; }
td button { all: unset; cursor: pointer; } td button:hover { text-decoration: underline dotted; }
td button:focus-visible { outline: 2px solid; } summary { cursor: pointer; font-weight: 600; margin: .6rem 0; }
pre { overflow-x: auto; background: var(--tint); padding: .8rem; font-size: .85rem; }
dialog { color: var(--fg); background: var(--bg); border: 1px solid var(--line); border-radius: 6px; max-width: 56rem;
  width: calc(100vw - 2rem); box-sizing: border-box; max-height: 85vh; } dialog::backdrop { background: #0008; }
dialog dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 .8rem; font-size: .85rem;
  margin: .2rem 0 1rem; }
dialog dd { margin: 0; overflow-wrap: anywhere; } dialog h4 { margin: .6rem 0 0; }
@media (max-width: 40rem) { body { margin: 1rem auto; padding: 0 .7rem; }
  th, td { padding: .3rem .45rem; font-size: .85rem; }
  th:first-child, td:first-child { position: sticky; left: 0; background: var(--bg); max-width: 9rem;
    white-space: normal; }
  tfoot td:first-child { background: var(--tint); } }
@media print { dialog { display: none; } }
"""
SCRIPT = """
const runs = JSON.parse(document.getElementById('runs').textContent), box = document.querySelector('dialog');
const add = (parent, tag, text) => { const made = document.createElement(tag); made.textContent = text;
  parent.append(made); return made; };
document.querySelectorAll('td button').forEach((button) => button.addEventListener('click', () => {
  const body = box.querySelector('div'); body.replaceChildren();
  add(body, 'h3', button.dataset.title);
  for (const [seed, id, value] of JSON.parse(button.dataset.runs)) {
    add(body, 'h4', `seed ${seed}: ${value}`);
    const list = add(body, 'dl', '');
    for (const [key, text] of Object.entries(runs[id] ?? {})) { add(list, 'dt', key); add(list, 'dd', text); }
  }
  box.showModal();
}));
box.addEventListener('click', (event) => { if (event.target === box) box.close(); });
"""
HASH_DIGITS = 16


def document_page(document: Document, figures: Mapping[str, Path]) -> str:
    """The page's HTML.

    Args:
        figures: The file of each drawing by its name.
    """
    links = "".join(f'<a href="#{_e(one.name)}">{_e(one.title)}</a>' for one in document.sections)
    about = f"<p>{_e(document.about)}</p>" if document.about else ""
    body = (
        f"<h1>{_e(document.name)}</h1>{about}{_status(document.runs)}"
        f'<nav>{links}<a href="#protocol">Protocol</a><a href="#provenance">Provenance</a></nav>'
        "<p class=note>Headings sort. A cell opens to its runs: seeds, values, options, hashes.</p>"
        + "".join(_section(section, figures) for section in document.sections)
        + _protocol([results.campaign for results in document.campaigns])
        + _provenance(document.runs)
        + '<dialog><form method="dialog"><button>Close</button></form><div></div></dialog>'
        + f'<script type="application/json" id="runs">{_json(_facts(document))}</script>'
    )
    return html_document(document.name, body, style=STYLE, script=SCRIPT)


def _section(section: Section, figures: Mapping[str, Path]) -> str:
    note = f"<p>{_e(section.note)}</p>" if section.note else ""
    details = "".join(map(_table, section.details))
    images = "".join(image(figures[one.name], one.alt, wide=one.wide) for one in section.drawings)
    status = _status(section.runs) if section.runs else ""
    return (
        f'<section><h2 id="{_e(section.name)}">{_e(section.title)}</h2>{note}{status}'
        + f"<div class=figures>{images}</div>"
        + "".join(map(_table, section.main))
        + (f"<details><summary>Further tables</summary>{details}</details>" if details else "")
        + "</section>"
    )


def _status(runs: tuple[FinalRun, ...]) -> str:
    counted = count_runs(runs)
    partial = "" if counted.failed == counted.missing == 0 else " partial"
    return f'<p class="status{partial}">{_e(str(counted))}.</p>'


def _table(table: Table) -> str:
    sheet, remark = table.sheet, f"<p class=note>{_e(table.remark)}</p>" if table.remark else ""
    return (
        f"<h3>{_e(sheet.title)}</h3><p class=note>{_e(sheet.note)}</p>"
        f"<div class=scroll tabindex=0>{html_table(sheet)}</div>{remark}"
    )


def _protocol(campaigns: Sequence[Campaign]) -> str:
    alone = len(campaigns) == 1
    parts = "".join(
        ("" if alone else f"<h3>Protocol of {_e(campaign.name)}</h3>") + _protocol_of(campaign)
        for campaign in campaigns
    )
    return f'<section><h2 id="protocol">Protocol</h2>{parts}</section>'


def _protocol_of(campaign: Campaign) -> str:
    rows = "".join(
        f"<tr><td class=label>{_e(study)}</td><td class=label>{_e(name)}</td>"
        f"<td class='label long'>{_e(values)}</td></tr>"
        for study, name, values in studies_axes(campaign)
    )
    head = "".join(f"<th class=label>{name}</th>" for name in ("study", "option", "values"))
    return (
        f"<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div><details><summary>The whole specification</summary>"
        f"<pre>{_e(protocol_yaml(campaign))}</pre></details>"
    )


def _provenance(runs: tuple[FinalRun, ...]) -> str:
    records = {run.run_id: run.record for run in runs}.values()
    counted = Counter(_source(record.provenance) for record in records if record is not None)
    lines = "".join(f"<li>{count} runs: {_e(source)}</li>" for source, count in sorted(counted.items()))
    return f'<section><h2 id="provenance">Provenance</h2><ul>{lines or "<li>No run is done.</li>"}</ul></section>'


def _source(source: Provenance) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    return f"commit {source.commit}; {versions}; {source.device}, {source.platform}"


def _facts(document: Document) -> dict[str, dict[str, str]]:
    """What the dialog of each run that a table shows says beside its value."""
    shown = {run.run_id for section in document.sections for table in section.tables for run in _runs(table)}
    found: dict[str, dict[str, str]] = {}
    for run in document.runs:
        if run.run_id is None or run.run_id in found or run.run_id not in shown:
            continue
        facts = {"run": run.run_id, "axes": ", ".join(full_name(*item) for item in run.axes.items())}
        if run.record is not None:
            facts |= {"options": _options(run.record.config.content()), "source": _source(run.record.provenance)}
            hashes = run.record.hashes.content() if run.record.hashes is not None else {}
            facts |= {f"{name} hash": str(value)[:HASH_DIGITS] for name, value in hashes.items()}
        elif run.failure is not None:
            facts["failure"] = f"{run.failure.reason}: {run.failure.message}"
        found[run.run_id] = facts
    return found


def _runs(table: Table) -> Iterator[SeedValue]:
    for line in (*table.sheet.rows, *table.sheet.foot):
        for cell in line:
            yield from cell.runs


def _options(config: Mapping[str, Any]) -> str:
    shown = {**config, **config.get("core", {})}
    return ", ".join(
        f"{axis_name(name)} {value_name(name, value)}"
        for name, value in shown.items()
        if value is not None and name not in ("core", "data_root", "device")
    )


def _json(value: Any) -> str:
    return json.dumps(value).replace("<", "\\u003c")


def _e(text: str) -> str:
    return html.escape(text)
