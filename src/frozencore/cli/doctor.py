"""``frozencore doctor``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from frozencore.words import one_line

HEALTHY, WRONG, NOT_OURS = 0, 1, 2


def doctor(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(help="An adapter, a basis (model), a moments file, a LoRA, a run, an evaluation or a campaign."),
    ],
) -> None:
    from frozencore.cli.findings import diagnose

    found = diagnose(path)
    if found.kind is None:
        what = "holds nothing of ours" if path.exists() else "does not exist"
        context.obj.print(
            f"{path} {what}. Name an adapter, a basis, a moments file, a LoRA, a run, an evaluation or a campaign.",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(NOT_OURS)
    table = Table(title=Text(one_line(f"{path}: {found.kind}")), title_justify="left")
    for heading in ("", "part", "found"):
        table.add_column(heading)
    for finding in found.findings:
        mark = Text("sound", style="green") if finding.sound else Text("wrong", style="red")
        table.add_row(mark, Text(one_line(finding.part)), Text(one_line(finding.found)))
    context.obj.print(table)
    raise typer.Exit(HEALTHY if found.healthy else WRONG)
