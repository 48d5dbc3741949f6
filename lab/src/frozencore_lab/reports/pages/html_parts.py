"""What every page of ours is made of: one style for phones and dark mode, sortable tables, embedded figures."""

from __future__ import annotations

import base64
import html
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --fg: #1a1a1a; --bg: #fff; --line: #ccc; --soft: #555; --tint: #f2f5f9;
  --link: #0058a3; }
@media (prefers-color-scheme: dark) { :root { --fg: #eee; --bg: #16181c; --line: #444; --soft: #aaa; --tint: #22272f;
  --link: #7cc4ff; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); max-width: 80rem;
  margin: 2rem auto; padding: 0 1rem; }
a { color: var(--link); } figure { margin: 1rem 0; } img { max-width: 100%; background: #fff; border-radius: 4px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th.label, td.label { text-align: left; }
th button { all: unset; cursor: pointer; font-weight: 600; } th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
p.note, footer { color: var(--soft); }
"""
SORT = """
document.querySelectorAll('th button').forEach((button) => button.addEventListener('click', () => {
  const head = button.parentNode, table = button.closest('table'), body = table.tBodies[0], index = head.cellIndex;
  const up = head.getAttribute('aria-sort') !== 'ascending';
  for (const other of head.parentNode.cells) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const value = (row) => {
    const text = row.cells[index].dataset.value ?? '';
    return text === '' ? null : isNaN(text) ? text : Number(text);
  };
  const order = (x, y) => x === null || y === null ? (x === null) - (y === null)  // what is missing stays last
    : (x > y ? 1 : x < y ? -1 : 0) * (up ? 1 : -1);
  [...body.rows].sort((a, b) => order(value(a), value(b))).forEach((row) => body.append(row));
}));
"""


def html_document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """A whole page from the HTML of its body; nothing in it is loaded from elsewhere."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}{style}</style>{body}<script>{SORT}{script}</script></html>\n"
    )


def image(path: Path, alt: str, *, wide: bool = False) -> str:
    """A PNG as part of the page."""
    content = base64.b64encode(path.read_bytes()).decode()
    kind = " class=wide" if wide else ""
    return f'<figure{kind}><img alt="{html.escape(alt)}" src="data:image/png;base64,{content}"></figure>'
