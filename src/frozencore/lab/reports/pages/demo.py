"""One self-contained HTML page: figures, a sortable table, where the numbers come from; for phones and dark mode."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frozencore.lab.reports.pages.html_parts import html_document, image
from frozencore.lab.run.provenance import provenance
from frozencore.whole_file import write_text

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
    images = "".join(image(figure, figure.stem) for figure in figures)
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
        html_document(
            title,
            f"<h1>{html.escape(title)}</h1><p class=note>{html.escape(note)}</p>{images}"
            f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
            f"<footer><p>Commit {html.escape(str(source['commit']))}; {html.escape(versions)}; "
            f"{html.escape(source['platform'])}.</p></footer>",
            style="th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }",
        ),
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and value > 999 else html.escape(str(value))
