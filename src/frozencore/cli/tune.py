"""``frozencore tune``: one run and its final screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from frozencore.cli.console import console
from frozencore.cli.flags import DryRun, Out, Resume, TakesRun, as_flags, require_out, told_if_nothing_is_kept
from frozencore.files.hub import require_upload, upload
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import ADAPTER, OPTIONS_FILE, RECORD, SAMPLES, interrupted_work, refuse_used
from frozencore.tune.locate import require_files
from frozencore.tune.processes import is_first, joined, refuse_several

DEFAULTS = {"batch_size": "auto", "samples": 3, "exact_match": "auto"}


def _tune(
    config: RunConfig,
    output: Out = None,
    moments: Annotated[
        Path | None,
        typer.Option(
            help="A moments file of `frozencore calibrate`, in place of a new calibration pass.",
            rich_help_panel="Method and bases",
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the adapter; a new repository is private.")
    ] = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    if dry_run:
        refuse_several("--dry-run")
    require_files(config, moments)
    if dry_run:
        from frozencore.cli.dry_run import print_dry_run

        print_dry_run(config, DEFAULTS)
        return
    output = require_out(output)
    refuse_used(output, resume=resume)
    if push_to_hub is not None:
        require_upload(push_to_hub)
    from frozencore.cli.display import StageDisplay, resume_line

    if resume:
        console.print(resume_line(output))
    with told_if_nothing_is_kept(lambda: _kept(output)), joined(), StageDisplay(console) as progress:
        from frozencore.cli.run_summary import run_summary, sample_lines, size_lines
        from frozencore.files.whole_file import write_text
        from frozencore.tune.figures import FIGURE, write_learning
        from frozencore.tune.run import execute

        progress.started()
        record = execute(config, output, progress, resume=resume, moments_file=moments)
    if not is_first():
        return
    for warning in record.warnings:
        console.print(f"Warning: {warning}", style="yellow")
    console.print(run_summary(record))
    if (output / SAMPLES).is_file():
        console.print(Group(*sample_lines(output / SAMPLES)))
    for line in size_lines(output / ADAPTER):
        console.print(line, soft_wrap=True)
    write_text(output / OPTIONS_FILE, as_flags(config))
    write_learning(record, output)
    console.print(f"Adapter: {output / ADAPTER}   Record: {output / RECORD}   Curve: {output / FIGURE}")
    if push_to_hub is not None:
        console.print(f"Uploaded: {upload(output / ADAPTER, push_to_hub)}")


def _kept(output: Path) -> bool:
    return interrupted_work(output) is not None or (output / RECORD).is_file()


tune = TakesRun(_tune, defaults=DEFAULTS)
