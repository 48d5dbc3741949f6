"""One self-contained HTML page: figures, a sortable table, where the numbers come from; for phones and dark mode."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frozencore.lab.record import provenance, write_text

_STYLE = """
:root { color-scheme: light dark; --fg: #1a1a1a; --bg: #fff; --line: #ccc; --soft: #555; }
@media (prefers-color-scheme: dark) { :root { --fg: #eee; --bg: #16181c; --line: #444; --soft: #aaa; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); max-width: 80rem;
  margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1rem 0; } img { max-width: 100%; background: #fff; border-radius: 4px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
th button { all: unset; cursor: pointer; font-weight: 600; } th button:focus-visible { outline: 2px solid; }
p.note, footer { color: var(--soft); }
"""
_SORT = """
document.querySelectorAll('th button').forEach((button) => button.addEventListener('click', () => {
  const table = button.closest('table'), body = table.tBodies[0], index = button.parentNode.cellIndex;
  const up = button.dataset.up !== '1';
  button.dataset.up = up ? '1' : '0';
  const value = (row) => { const text = row.cells[index].dataset.value; return isNaN(text) ? text : Number(text); };
  [...body.rows].sort((a, b) => (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0) * (up ? 1 : -1))
    .forEach((row) => body.append(row));
}));
"""
_COLUMNS = {
    "task": "task",
    "method": "method",
    "accuracy_before": "accuracy before",
    "accuracy": "accuracy",
    "standard_error": "± se",
    "held_out_loss": "held-out loss",
    "calibration_s": "calibration s",
    "training_s": "training s",
    "trainable_parameters": "trained values",
    "seed": "seed",
}


def write_page(
    path: Path, title: str, note: str, records: Sequence[Mapping[str, Any]], figures: Sequence[Path]
) -> None:
    """Write the page; figures are embedded, so that the file can be sent alone."""
    images = "".join(
        f'<figure><img alt="{html.escape(figure.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(figure.read_bytes()).decode()}"></figure>'
        for figure in figures
    )
    head = "".join(f'<th><button type="button">{html.escape(name)}</button></th>' for name in _COLUMNS.values())
    body = "".join(
        "<tr>"
        + "".join(f'<td data-value="{html.escape(str(row[key]))}">{_shown(row[key])}</td>' for key in _COLUMNS)
        + "</tr>"
        for row in records
    )
    source = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    write_text(
        path,
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><p class=note>{html.escape(note)}</p>{images}"
        f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f"<footer><p>Commit {html.escape(str(source['commit']))}; {html.escape(versions)}; "
        f"{html.escape(source['platform'])}.</p></footer><script>{_SORT}</script></html>\n",
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and value > 999 else html.escape(str(value))
