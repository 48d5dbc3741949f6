"""``frozencore tune``, ``tune-many`` and ``calibrate``: the verbs that take the configuration of a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from frozencore.cli.display import StageDisplay, console, table_of
from frozencore.cli.flags import DryRun, Out, Resume, RunCommand, require_out, told_if_nothing_is_kept
from frozencore.errors import ConfigError, FrozenCoreError, RankError
from frozencore.text import bytes_in_words, num_of, one_line
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import (
    ADAPTER,
    BASIS,
    FIGURE,
    RECORD,
    SAMPLES,
    interrupted_work,
    refuse_used,
    require_new,
    require_same_options,
)
from frozencore.tune.locate import find_tenants, other_files, require_files, require_tenant_files
from frozencore.tune.many.folder import refuse_taken
from frozencore.tune.processes import is_first, joined, num_started, own_number, refuse_several

if TYPE_CHECKING:
    from frozencore.tune.record import Failure, TunedRecord

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
        from frozencore.cli.run_screen import print_dry_run

        print_dry_run(config)
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
        from frozencore.files.hub_client import require_upload

        require_upload(push_to_hub)
    if resume:
        _print_resumed(output)
    kept = told_if_nothing_is_kept(lambda: interrupted_work(output) or (output / RECORD).is_file())
    with kept, joined(), StageDisplay(console) as progress:
        from frozencore.cli.run_screen import run_summary, sample_lines, size_lines
        from frozencore.tune.run import execute

        progress.started()
        record = execute(config, output, progress, resume=resume)
    if not is_first():
        return
    for warning in record.warnings:
        console.print(f"Warning: {warning}", style="yellow")
    console.print(run_summary(record))
    if (output / SAMPLES).is_file():
        console.print(Group(*sample_lines(output / SAMPLES)))
    for line in size_lines(output / ADAPTER):
        console.print(line, soft_wrap=True)
    console.print(f"Adapter: {output / ADAPTER}   Record: {output / RECORD}   Curve: {output / FIGURE}", soft_wrap=True)
    if push_to_hub is not None:
        from frozencore.files.hub_client import upload

        console.print(f"Uploaded: {upload(output / ADAPTER, push_to_hub)}")


tune = RunCommand(_tune)


def print_other_files(tenants: Path) -> None:
    """Name what a folder of tenants holds beside their row files."""
    if others := other_files(tenants):
        line = f"Not rows of a tenant, so not read: {', '.join(others)} ({len(others)} in {tenants})"
        console.print(one_line(line, 1000), style="yellow", soft_wrap=True)


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
    require_tenant_files(config)
    print_other_files(tenants)
    if dry_run:
        refuse_several("--dry-run")
        from frozencore.cli.run_screen import print_dry_run

        print_dry_run(config, slots)
        return
    output = require_out(output)
    names = find_tenants(tenants)
    if num_started() == 1:  # else another process may have finished a tenant of its own already
        refuse_taken(output, names, resume=resume)

    def num_kept() -> int:
        return sum((output / name / RECORD).is_file() for name in names)

    if resume:
        console.print(f"{num_kept()} of {num_of(len(names), 'tenant')} have their result in {output}")
    with told_if_nothing_is_kept(num_kept), StageDisplay(console) as stages:
        from frozencore.tune.many.run import execute_many
        from frozencore.tune.record import Failure

        stages.started()
        try:
            outcomes = execute_many(config, output, stages, num_slots=slots, resume=resume)
        except FrozenCoreError as error:
            if is_first():
                raise
            raise RankError(f"Process {own_number() + 1} of {num_started()}: {error}") from error
    console.quiet = False  # each process tells of its own tenants
    records = {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, Failure)}
    failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
    for warning in dict.fromkeys(warning for record in records.values() for warning in record.warnings):
        console.print(f"Warning: {warning}", style="yellow")
    console.print(_summary(records, failures))
    console.print(f"Adapters: {output}/NAME/adapter   Records: {output}/NAME/result.json", soft_wrap=True)
    if failures and num_started() == 1:  # torchrun would end the other processes before they have finished
        raise typer.Exit(1)


def _summary(records: Mapping[str, TunedRecord], failures: Mapping[str, Failure]) -> Group:
    """Show the gain of each tenant, and their cost together."""
    cells: list[tuple[str, ...]] = []
    for name, record in records.items():
        rows, steps = record.rows.trained, str(record.training.num_steps)
        if record.selection is not None and record.selection.kept_step != record.training.num_steps:
            steps = f"{record.selection.kept_step} of {steps}"
        losses = (record.held_out_loss_before, record.held_out_loss)
        shown = ("" if loss is None else f"{loss:.3f}" for loss in losses)
        cells.append((name, str(rows), steps, *shown, f"{record.training_s:.1f}"))
    cells += [(name, "", "", "", failure.reason, "") for name, failure in failures.items()]
    lines = [Text(f"{name}: {failure.message}") for name, failure in failures.items()]
    if records:
        from frozencore.cli.run_screen import of_setup, of_start

        first, *_ = records.values()
        lines += map(Text, of_start(first))
        lines.append(
            Text(
                f"{first.num_trainable:,} trained values each; {of_setup(first)}, "
                f"training {sum(record.training_s for record in records.values()):.1f} s together, "
                f"peak memory {bytes_in_words(max(record.peak_memory_bytes for record in records.values()))}"
            )
        )
    headings = ("tenant", "rows", "steps", "held-out loss before", "after", "share, s")
    title = f"{num_of(len(cells), 'tenant')} on one basis"
    return Group(table_of(title, headings, cells, names=("tenant",)), *lines)


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
        print_other_files(tenants)
    with warnings.catch_warnings(record=True) as caught, joined(), StageDisplay(console) as progress:
        from frozencore.tune.calibrate_only import execute_calibration

        progress.started()
        warnings.simplefilter("always")
        calibration = execute_calibration(config, output, progress, of_tenants=tenants is not None)
    if not is_first():
        return
    for told in sorted({str(one.message) for one in caught if one.category is UserWarning}):
        console.print(f"Warning: {told}", style="yellow")
    from frozencore.cli.inspect import calibration_summary

    console.print(calibration_summary(calibration, every_layer=all_layers))
    console.print(f"Basis: {output / BASIS}   Adapter: {output / ADAPTER}", soft_wrap=True)
    rows = "tune --data ROWS" if tenants is None else f"tune-many --tenants {tenants}"
    next_line = f"frozencore {rows} --model {config.model.name} --basis {output / BASIS} --out OUT"
    console.print(f"Next: {next_line}", soft_wrap=True)


calibrate = RunCommand(
    _calibrate,
    without=(
        "basis", "start_from", "learning_rate", "warmup", "epochs", "batch_size", "accumulation", "save_steps",
        "report_to", "patience", "samples", "exact_match", "forgetting",
    ),
)  # fmt: skip
