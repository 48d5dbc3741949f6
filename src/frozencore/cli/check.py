"""``frozencore check``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console


def check(
    directory: Annotated[Path, typer.Argument(help="Any LoRA directory: adapter_config.json and its weights.")],
) -> None:
    from frozencore.adapter.export.serving import ENGINES, check_lora_directory
    from frozencore.cli.exporting import serving_lines

    report = check_lora_directory(directory)
    for line in serving_lines(report):
        console.print(line, highlight=False)
    raise typer.Exit(0 if report.engines == ENGINES else 1)
