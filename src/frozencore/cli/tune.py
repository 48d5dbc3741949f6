"""``frozencore tune``: parse, call, print."""

from __future__ import annotations

from functools import partial
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


def tune(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "--out", help="New folder for the adapter and its record.")],
    task: TaskName = None,
    data: Data = None,
    data_root: DataRoot = None,
    method: Method = "fcca",
    rank: Rank = 16,
    targets: Targets = None,
    calibration_size: CalibrationSize = 128,
    memory_budget: Annotated[
        str | None, typer.Option(help="What calibration may take beside the model, 8GiB for instance (docs/memory.md).")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option("--lr", "--learning-rate", help="The peak. Default: the method's own, 5e-3 for cores."),
    ] = None,
    warmup: Annotated[
        float | None, typer.Option(help="Share of the steps in which the rate rises. Default: the method's own.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: the task's number; 1 for --data.")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows in one forward pass.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Forward passes in one optimiser step.")] = 8,
    seed: Seed = 42,
    evaluate_on: Annotated[
        str, typer.Option(help="evaluation, or validation: rows to choose options with, never evaluated.")
    ] = "evaluation",
    num_train: Annotated[int | None, typer.Option(help="Training rows. Default: the protocol's.")] = None,
    num_evaluation: Annotated[int | None, typer.Option(help="Evaluation rows. Default: the protocol's.")] = None,
    paper_steps: Annotated[
        bool,
        typer.Option(
            "--paper-steps",
            help="Train on all rows, as the paper: where a task has no others, no tenth is held out to validate on.",
        ),
    ] = False,
    select_checkpoint: Annotated[
        str,
        typer.Option(
            metavar="none|epoch|STEPS",
            help="Keep the best of the steps that validation rows are scored at: each epoch's last, or every so many.",
        ),
    ] = "none",
    select_by: Annotated[
        str, typer.Option(help="What the best step is: accuracy (ties by held-out loss), or held_out_loss.")
    ] = "accuracy",
    max_length: MaxLength = None,
    truncate: Truncate = False,
    prompt_style: Annotated[str, typer.Option(help="auto, chat or plain.")] = "auto",
    prompt_date: PromptDate = TODAY,
    alpha: Annotated[float | None, typer.Option(help="Scale s = alpha / r of the cores. Default: s = 1.")] = None,
    whiten: Whiten = "both",
    fisher: Fisher = "diagonal",
    damping: Damping = 1e-3,
    coordinates: Coordinates = "qr",
    moments: Annotated[
        Path | None, typer.Option(help="A moments file of `frozencore calibrate`, instead of a new pass.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    from frozencore.cli.display import StageDisplay
    from frozencore.cli.tables import run_summary
    from frozencore.lab.run.config import make_config
    from frozencore.lab.run.execute import adapt_from_data, execute

    config = make_config(
        model=model, task=task, data=data, data_root=data_root, method=method, rank=rank,
        targets=read_targets(targets), calibration_size=calibration_size, memory_budget=memory_budget,
        learning_rate=learning_rate, warmup=warmup,
        epochs=epochs, batch_size=batch_size, accumulation=accumulation, seed=seed, evaluate_on=evaluate_on,
        num_train=num_train, num_evaluation=num_evaluation, paper_steps=paper_steps,
        select_checkpoint=int(select_checkpoint) if select_checkpoint.isdecimal() else select_checkpoint,
        select_by=select_by, max_length=max_length,
        truncate=truncate, prompt_style=prompt_style, prompt_date=read_date(prompt_date),
        core={"alpha": alpha, "whiten": whiten, "fisher": fisher, "damping": damping, "coordinates": coordinates},
        dtype=dtype, device=device,
    )  # fmt: skip
    with StageDisplay(console) as stages:
        record = execute(config, output, stages, resume=resume, adapt=partial(adapt_from_data, moments_file=moments))
    for warning in record.warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
    console.print(run_summary(record))
    console.print(f"Adapter: {output / 'adapter'}   Record: {output / 'result.json'}", highlight=False)
