"""``frozencore demo``: parse, call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console
from frozencore.cli.options import Seed


def demo(
    output: Annotated[
        Path, typer.Option("--output", "--out", help="Folder for records, table, figure and page.")
    ] = Path("runs/demo"),
    workers: Annotated[int | None, typer.Option(help="Runs at a time. Default: one per core, at most eight.")] = None,
    seed: Seed = 42,
) -> None:
    from frozencore.cli.demo_runs import run_demo

    run_demo(output, console, num_workers=workers, seed=seed)
