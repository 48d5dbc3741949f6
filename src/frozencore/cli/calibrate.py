"""``frozencore calibrate``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console
from frozencore.cli.options import (
    TODAY,
    CalibrationSize,
    Coordinates,
    Damping,
    Data,
    DataRoot,
    Device,
    Dtype,
    Fisher,
    MaxLength,
    Method,
    Model,
    PromptDate,
    Rank,
    Seed,
    Targets,
    TaskName,
    Truncate,
    Whiten,
    read_date,
    read_targets,
)


def calibrate(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "--out", help="New folder for the moments and the adapter.")],
    task: TaskName = None,
    data: Data = None,
    data_root: DataRoot = None,
    method: Method = "fcca",
    rank: Rank = 16,
    targets: Targets = None,
    calibration_size: CalibrationSize = 128,
    seed: Seed = 42,
    max_length: MaxLength = None,
    truncate: Truncate = False,
    prompt_date: PromptDate = TODAY,
    whiten: Whiten = "both",
    fisher: Fisher = "diagonal",
    damping: Damping = 1e-3,
    coordinates: Coordinates = "qr",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    from frozencore.cli.display import StageDisplay
    from frozencore.cli.tables import calibration_summary
    from frozencore.lab.run.calibrating import execute_calibration
    from frozencore.lab.run.config import make_config

    config = make_config(
        model=model, task=task, data=data, data_root=data_root, method=method, rank=rank, targets=read_targets(targets),
        calibration_size=calibration_size, seed=seed, max_length=max_length, truncate=truncate,
        prompt_date=read_date(prompt_date),
        core={"whiten": whiten, "fisher": fisher, "damping": damping, "coordinates": coordinates},
        dtype=dtype, device=device,
    )  # fmt: skip
    with StageDisplay(console) as stages:
        calibration = execute_calibration(config, output, stages)
    console.print(calibration_summary(calibration))
    console.print(f"Adapter: {output / 'adapter'}   Moments: {output / 'moments.safetensors'}", highlight=False)
