"""A sheet as an HTML table: headings that sort, cells that carry their runs."""

from __future__ import annotations

import html
import json

from frozencore_lab.reports.sheets.sheet import Line, SeedValue, Sheet, SheetCell


def html_table(sheet: Sheet) -> str:
    """The table alone, without the sheet's title and note."""
    head = "".join(
        f'<th{_label(sheet, i)} scope="col"><button type="button">{_e(heading)}</button></th>'
        for i, heading in enumerate(sheet.headings)
    )
    foot = "".join(_line(sheet, line) for line in sheet.foot)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(_line(sheet, line) for line in sheet.rows)}</tbody>"
        f"{f'<tfoot>{foot}</tfoot>' if foot else ''}</table>"
    )


def _line(sheet: Sheet, line: Line) -> str:
    name = ", ".join(cell.text for cell in line[: sheet.num_labels])
    return f"<tr>{''.join(_cell(sheet, i, cell, name) for i, cell in enumerate(line))}</tr>"


def _cell(sheet: Sheet, place: int, cell: SheetCell, row: str) -> str:
    classes = [*(["label"] if place < sheet.num_labels or isinstance(cell.value, str) else [])]
    classes += [
        *(["best"] if cell.best else ["second"] if cell.second else []),
        *(["long"] if len(cell.text) > 60 else []),
    ]
    value = "" if cell.value is None else str(cell.value).replace("inf", "Infinity")
    shown = _e(cell.text) + (f" <small>± {_e(cell.spread)}</small>" if cell.spread else "")
    if cell.runs:
        runs = json.dumps([[run.seed, run.run_id, _shown(run)] for run in cell.runs])
        title = f"{sheet.headings[place]}, {row}"
        shown = f'<button type="button" data-title="{_e(title)}" data-runs="{_e(runs)}">{shown}</button>'
    hint = f' title="{_e(cell.hint)}"' if cell.hint else ""
    return f'<td class="{" ".join(classes)}" data-value="{_e(value)}"{hint}>{shown}</td>'


def _shown(run: SeedValue) -> str:
    if run.value is None:
        return run.message
    return f"{run.value:.6g}" + (f" ({run.message})" if run.message else "")


def _label(sheet: Sheet, place: int) -> str:
    words = place < sheet.num_labels or any(isinstance(line[place].value, str) for line in sheet.rows)
    return " class=label" if words else ""


def _e(text: str) -> str:
    return html.escape(text)
