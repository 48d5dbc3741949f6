"""``frozencore tune``: parse, call, print."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console
from frozencore.cli.run_flags import TakesRun
from frozencore.lab.run.config import RunConfig


def _tune(
    config: RunConfig,
    output: Annotated[Path, typer.Option("--output", "--out", help="New folder for the adapter and its record.")],
    moments: Annotated[
        Path | None, typer.Option(help="A moments file of `frozencore calibrate`, instead of a new pass.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")] = False,
) -> None:
    from frozencore.cli.display import StageDisplay
    from frozencore.cli.tables import run_summary
    from frozencore.lab.run.execute import adapt_from_data, execute

    with StageDisplay(console) as progress:
        record = execute(config, output, progress, resume=resume, adapt=partial(adapt_from_data, moments_file=moments))
    for warning in record.warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
    console.print(run_summary(record))
    console.print(f"Adapter: {output / 'adapter'}   Record: {output / 'result.json'}", highlight=False)


tune = TakesRun(_tune)
