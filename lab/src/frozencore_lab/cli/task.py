"""``frozencore task``: list the tasks, or write the rows of one as files for ``--data``."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from frozencore.cli.display import console, table_of
from frozencore.cli.flags import flag
from frozencore.errors import ConfigError
from frozencore.files.atomic_write import write_lines
from frozencore.tune.folder import require_new
from frozencore.tune.rows.row import Row
from frozencore_lab.tasks.registry import TASKS, find_task

PARTS = ("train", "validation", "evaluation")


def task(
    name: Annotated[str | None, typer.Argument(help="A task, or its YAML file. Default: list all tasks.")] = None,
    output: Annotated[
        Path | None, typer.Option("--out", "--output", help="New folder for train.jsonl, evaluation.jsonl, ...")
    ] = None,
    data_root: Annotated[Path | None, flag("data_root")] = None,
    num_train: Annotated[int | None, flag("num_train")] = None,
    num_evaluation: Annotated[int | None, flag("num_evaluation")] = None,
) -> None:
    if name is None:
        _print_tasks()
        return
    found = find_task(name)
    if output is None:
        raise ConfigError(f"Where are the rows of {found.name} to stand? Give --out DIR.")
    require_new(output, *(f"{part}.jsonl" for part in PARTS))
    splits = found.draw(data_root, num_train=num_train, num_evaluation=num_evaluation)
    for part in PARTS:
        if rows := getattr(splits, part):
            write_lines(output / f"{part}.jsonl", map(_line, rows))
            console.print(f"{len(rows):,} rows: {output / part}.jsonl", soft_wrap=True)
    files = ["--data", f"{output}/train.jsonl", "--eval-data", f"{output}/evaluation.jsonl"]
    console.print(f"Next: frozencore tune --model MODEL {shlex.join(files)} --out OUT", soft_wrap=True)


def _line(row: Row) -> dict[str, Any]:
    if not row.prompt:
        return {"id": row.id, "text": row.completion}
    return {key: value for key in ("id", "prompt", "completion", "choices") if (value := asdict(row)[key])}


def _print_tasks() -> None:
    rows = []
    for one in TASKS.values():
        origin, size = one.source.origin, f"{one.num_train} / {one.num_evaluation}"
        place = ", ".join(part for part in (origin.name, origin.configuration) if part not in ("", "default"))
        rows.append((one.name, size, str(one.epochs), one.scoring.replace("_", " "), place))
    headings = ("task", "train / evaluation rows", "epochs", "scoring", "data")
    console.print(table_of(None, headings, rows, names=("task", "scoring", "data")))
