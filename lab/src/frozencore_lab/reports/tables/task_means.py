"""A table of task means from a CSV file, strictly: what is not a number is not guessed at."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from frozencore.errors import DataError
from frozencore_lab.reports.sheets.render import without_apostrophe
from frozencore_lab.reports.tables.comparison import TaskTable

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
SUMMARIES = ("mean", "average", "avg", "macro-average", "total")


def read_task_means(path: Path) -> TaskTable:
    """A CSV of task means: a heading line, then one line a task, its name first and one number for each column.

    Raises:
        DataError: In one line, what is wrong with which line or cell.
    """
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True))
        lines = [[without_apostrophe(cell) for cell in line] for line in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path} cannot be read as a CSV table: {reason}.") from error
    rows = [(i, [cell.strip() for cell in line]) for i, line in enumerate(lines, 1) if any(map(str.strip, line))]
    if len(rows) < 2:
        raise DataError(f"{path} holds no table: a heading line and a line for each task are needed.")
    (_, (_, *names)), *body = rows
    if not names:
        raise DataError(
            f"{path} has one column only. Separate columns with commas: the task, then one for each method."
        )
    _require_distinct(path, "column", names)
    _require_distinct(path, "task", [cells[0] for _, cells in body])
    columns: dict[str, dict[str, float | None]] = {name: {} for name in names}
    for i, (task, *cells) in body:
        if task.casefold() in SUMMARIES:
            raise DataError(f"{path}, line {i}: {task!r} is no task but a summary. Leave that line out.")
        if len(cells) != len(names):
            raise DataError(f"{path}, line {i}: {task} must have {len(names)} numbers, but {len(cells)} came.")
        for name, cell in zip(names, cells, strict=True):
            columns[name][task] = _number(cell, f"{path}, line {i}: {name} on {task}")
    return TaskTable(tuple(cells[0] for _, cells in body), columns)


def _number(cell: str, where: str) -> float:
    if not cell:
        raise DataError(f"{where} is missing. Fill it in, or leave the line or the column out.")
    if not NUMBER.fullmatch(cell) or abs(float(cell)) == float("inf"):
        raise DataError(f"{where} must be a finite number, but {cell!r} came.")
    return float(cell)


def _require_distinct(path: Path, what: str, names: Sequence[str]) -> None:
    for name in names:
        if not name:
            raise DataError(f"{path} has a {what} without a name.")
        if names.count(name) > 1:
            raise DataError(f"{path} has the {what} {name!r} twice.")
