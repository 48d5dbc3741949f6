"""``frozencore tune``, ``tune-many`` and ``calibrate``: the verbs that take the configuration of a run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.display import console
from frozencore.cli.flags import (
    DryRun,
    Out,
    Resume,
    RunCommand,
    note_if_nothing_kept,
    print_unread_files,
    require_out,
)
from frozencore.cli.stages import StageDisplay
from frozencore.errors import ConfigError
from frozencore.files.hub import hub_client
from frozencore.files.names import ADAPTER, BASIS
from frozencore.text import num_of
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import RECORD, interrupted_work, refuse_used, require_new, require_same_options
from frozencore.tune.locate import require_files, require_tenant_files
from frozencore.tune.many.folder import refuse_taken, unfinished_in
from frozencore.tune.processes import is_first, num_started, refuse_several

TENANTS = "Folder with a row file (as for `tune --data`) for each tenant, named after it; or a YAML file 'name: file'."


def _tune(
    config: RunConfig,
    output: Out = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the adapter; a new repository is private.")
    ] = None,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    if dry_run:
        refuse_several("--dry-run")
    require_files(config)
    if dry_run:
        _dry_run(config)
        return
    output = require_out(output)
    refuse_used(output, resume=resume)
    if resume:
        require_same_options(output, config)
    if push_to_hub is not None:
        if config.method.basis is not None and Path(config.method.basis).is_dir():
            raise ConfigError(
                f"--push-to-hub uploads cores, whose basis must be on the hub too, but {config.method.basis} is a "
                "folder. Upload it (hf upload OWNER/NAME FOLDER), and give --basis OWNER/NAME."
            )
        hub_client().require_upload(push_to_hub)
    if resume:
        _print_resumed(output)
    kept = note_if_nothing_kept(lambda: interrupted_work(output) or (output / RECORD).is_file())
    with kept, StageDisplay(console) as progress:
        from frozencore.cli import runs

        progress.started()
        record = runs.tune(config, output, progress, resume=resume)
    if not is_first():
        return
    runs.print_run(record, output)
    if push_to_hub is not None:
        console.print(f"Uploaded: {hub_client().upload(output / ADAPTER, push_to_hub)}")


tune = RunCommand(_tune)


def _dry_run(config: RunConfig, slots: int | None = None) -> None:
    with StageDisplay(console) as progress:
        from frozencore.cli.run_screen import dry_run

        progress.started()
        lines = dry_run(config, progress, slots)
    for line in lines:
        console.print(line, soft_wrap=True)


def _print_resumed(output: Path) -> None:
    """Print from which checkpoint a run resumes."""
    kept = interrupted_work(output)
    console.print(
        f"Nothing to go on from in {output}: from the start" if kept is None else f"Goes on from {kept} in {output}"
    )


def _tune_many(
    config: RunConfig,
    tenants: Annotated[Path, typer.Option(help=TENANTS, rich_help_panel="Rows")],
    output: Out = None,
    slots: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tenants that train at once in a process; the others wait for a slot.",
            rich_help_panel="Training",
        ),
    ] = 64,
    resume: Resume = False,
    dry_run: DryRun = False,
) -> None:
    names = require_tenant_files(config)
    print_unread_files(tenants)
    if dry_run:
        refuse_several("--dry-run")
        _dry_run(config, slots)
        return
    output = require_out(output)
    if num_started() == 1:  # else another process may have finished a tenant of its own already
        refuse_taken(output, names, resume=resume)

    def num_kept() -> int:
        return sum((output / name / RECORD).is_file() for name in names)

    if resume:
        begun = len(unfinished_in(output, names))
        also = f", {begun} go on from their last step" if begun else ""
        console.print(f"{num_kept()} of {num_of(len(names), 'tenant')} have their result in {output}{also}")
    kept = note_if_nothing_kept(lambda: num_kept() or unfinished_in(output, names))
    with kept, StageDisplay(console) as stages:
        from frozencore.cli import runs

        stages.started()
        outcomes = runs.tune_many(config, output, stages, slots=slots, resume=resume)
    console.quiet = False  # each process prints its tenants
    succeeded = runs.print_tenants(outcomes, output)
    if not succeeded and num_started() == 1:  # torchrun would end the other processes before they have finished
        raise typer.Exit(1)
    if succeeded and is_first():
        first = shlex.quote(str(output / next(iter(names))))
        console.print(f"Next: frozencore chat {first} --with-base", soft_wrap=True)


tune_many = RunCommand(
    _tune_many,
    without=(
        "data", "task", "data_root", "paper_steps", "rows_by_seed", "report_to", "save_steps", "select_by", "samples",
        "exact_match", "max_new_tokens", "forgetting", "evaluate_on",
    ),
)  # fmt: skip


def _calibrate(
    config: RunConfig,
    output: Annotated[
        Path,
        typer.Option("--out", "--output", help="New folder for the basis and an adapter on it."),
    ],
    tenants: Annotated[
        Path | None,
        typer.Option(
            help=f"{TENANTS} In place of --data: calibrate one basis on --calibration-size rows of all tenants.",
            rich_help_panel="Rows",
        ),
    ] = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Print a line for each layer.")] = False,
) -> None:
    (require_files if tenants is None else require_tenant_files)(config)
    require_new(output, RECORD, ADAPTER, BASIS)
    if tenants is not None:
        print_unread_files(tenants)
    with StageDisplay(console) as progress:
        from frozencore.cli import runs

        progress.started()
        calibration, caught = runs.calibrate(config, output, progress, of_tenants=tenants is not None)
    if not is_first():
        return
    runs.print_calibration(calibration, caught, output, every_layer=all_layers)
    rows = ["tune", "--data", "ROWS"] if tenants is None else ["tune-many", "--tenants", str(tenants)]
    words = [*rows, "--model", config.model.name, "--basis", str(output / BASIS), "--out", "OUT"]
    console.print(f"Next: frozencore {shlex.join(words)}", soft_wrap=True)


calibrate = RunCommand(
    _calibrate,
    without=(
        "basis", "start_from", "learning_rate", "warmup", "epochs", "batch_size", "accumulation", "save_steps",
        "report_to", "patience", "samples", "exact_match", "forgetting", "bits", "select_by", "max_new_tokens",
    ),
)  # fmt: skip
