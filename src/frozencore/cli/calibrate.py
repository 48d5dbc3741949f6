"""``frozencore calibrate``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console
from frozencore.cli.run_flags import OF_ONE_TRAINING, TakesRun
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.early import refuse_early

OF_TRAINING = ("basis", "learning_rate", "warmup", "epochs", "batch_size", "accumulation", "patience", *OF_ONE_TRAINING)


def _calibrate(
    config: RunConfig,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "--out",
            help="New folder for the basis, the adapter and the moments; without moments with --memory-budget.",
        ),
    ],
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Print a line for each layer.")] = False,
) -> None:
    refuse_early(config)
    from frozencore.cli.display import StageDisplay
    from frozencore.cli.layer_tables import calibration_summary
    from frozencore.tune.run.calibrating import execute_calibration
    from frozencore.tune.run.files import ADAPTER, BASIS, MOMENTS_FILE

    with StageDisplay(console) as progress:
        calibration = execute_calibration(config, output, progress)
    console.print(calibration_summary(calibration, every_layer=all_layers))
    moments = f"   Moments: {output / MOMENTS_FILE}" if config.memory_budget is None else ""
    console.print(f"Basis: {output / BASIS}   Adapter: {output / ADAPTER}{moments}", highlight=False)


calibrate = TakesRun(_calibrate, without=OF_TRAINING)
