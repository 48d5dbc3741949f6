"""``frozencore tune``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from frozencore.cli.console import console
from frozencore.cli.flag_file import as_flags
from frozencore.cli.run_flags import TakesRun, read_choices
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.early import refuse_early
from frozencore.tune.run.interrupted import refuse_used
from frozencore.tune.run.options_by_name import SWEPT
from frozencore.tune.run.processes import is_first, joined, refuse_several


def _tune(
    config: RunConfig,
    output: Annotated[Path, typer.Option("--output", "--out", help="New folder for the adapter and its record.")],
    moments: Annotated[
        Path | None, typer.Option(help="A moments file of `frozencore calibrate`, instead of a new pass.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V,V,...",
            help="Train the run with each of these values side by side on one basis and keep the one that is best on "
            "validation rows: lr, warmup, epochs, batch-size, accumulation, seed (of the order of rows). May be "
            "given several times.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what is kept in --output.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Write nothing: say what it would read and take, and show the first row.",
        ),
    ] = False,
) -> None:
    if dry_run or sweep:
        refuse_several("--dry-run" if dry_run else "A sweep")
    refuse_early(config, moments)
    if dry_run:
        _show(config)
        return
    refuse_used(output, resume=resume)
    choices = read_choices(sweep or [], SWEPT)
    from frozencore.cli.adapter_size import size_lines
    from frozencore.cli.display import StageDisplay, resume_line
    from frozencore.cli.learning import FIGURE, write_learning
    from frozencore.cli.many_tables import sweep_summary
    from frozencore.cli.samples import sample_lines
    from frozencore.cli.tables import run_summary
    from frozencore.files.whole_file import write_text
    from frozencore.tune.run.execute import execute
    from frozencore.tune.run.files import ADAPTER, ASKED, SAMPLES
    from frozencore.tune.run.many.sweep import execute_sweep

    if resume:
        console.print(resume_line(output), highlight=False, markup=False)
    with joined(), StageDisplay(console) as progress:
        if choices:
            record, swept = execute_sweep(config, choices, output, progress, resume=resume, moments_file=moments)
        else:
            record, swept = execute(config, output, progress, resume=resume, moments_file=moments), None
    if not is_first():
        return
    for warning in record.warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
    if swept is not None:
        console.print(sweep_summary(swept))
    console.print(run_summary(record))
    if (output / SAMPLES).is_file():
        console.print(Group(*sample_lines(output / SAMPLES)))
    for line in size_lines(output / ADAPTER):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    write_text(output / ASKED, as_flags(config))
    curve = ""
    if record.training.losses:  # a private training tells none
        write_learning(record, output)
        curve = f"   Curve: {output / FIGURE}"
    console.print(f"Adapter: {output / 'adapter'}   Record: {output / 'result.json'}{curve}", highlight=False)


def _show(config: RunConfig) -> None:
    from frozencore.cli.display import StageDisplay
    from frozencore.cli.dry_run import dry_run_lines

    with StageDisplay(console) as progress:
        lines = list(dry_run_lines(config, progress))
    for line in lines:
        console.print(line, soft_wrap=True)


tune = TakesRun(_tune, defaults={"batch_size": "auto", "samples": 3, "exact_match": "auto"})
