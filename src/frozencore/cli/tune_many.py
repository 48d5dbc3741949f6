"""``frozencore tune-many``: train a core for each of many tenants, and print a table of their gains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.cli.console import console
from frozencore.cli.flags import DryRun, Out, Resume, TakesRun, require_out, told_if_nothing_is_kept
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import interrupted_work, refuse_finished
from frozencore.tune.locate import find_tenants, require_tenant_files
from frozencore.tune.processes import is_first, joined, refuse_several
from frozencore.words import bytes_in_words

if TYPE_CHECKING:
    from frozencore.tune.record import Failure, TunedRecord

TENANTS = "Folder with a row file (as for `tune --data`) for each tenant, named after it; or a YAML file 'name: file'."


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
    if dry_run:
        refuse_several("--dry-run")
        from frozencore.cli.dry_run import print_dry_run

        print_dry_run(config, {}, slots)
        return
    output = require_out(output)
    refuse_finished(output, find_tenants(tenants), resume=resume)
    from frozencore.cli.display import StageDisplay, resume_line

    if resume:
        console.print(resume_line(output))
    with told_if_nothing_is_kept(lambda: interrupted_work(output)), joined(), StageDisplay(console) as stages:
        from frozencore.tune.many.run import execute_many
        from frozencore.tune.record import Failure

        stages.started()
        outcomes = execute_many(config, output, stages, num_slots=slots, resume=resume)
    if not is_first():
        return
    records = {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, Failure)}
    failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
    console.print(_summary(records, failures))
    console.print(f"Adapters: {output}/NAME/adapter   Records: {output}/NAME/result.json")
    if failures:
        raise typer.Exit(1)


def _summary(records: Mapping[str, TunedRecord], failures: Mapping[str, Failure]) -> Group:
    """Show the gain of each tenant, and their cost together."""
    table = Table(title=f"{len(records) + len(failures)} tenants on one basis", title_justify="left")
    for heading in ("tenant", "rows", "steps", "held-out loss before", "after", "share, s"):
        table.add_column(heading, justify="left" if heading == "tenant" else "right")
    for name, record in records.items():
        rows, steps = record.rows.trained if record.rows else 0, str(record.training.num_steps)
        if record.selection is not None and record.selection.kept_step != record.training.num_steps:
            steps = f"{record.selection.kept_step} of {steps}"
        losses = (record.held_out_loss_before, record.held_out_loss)
        table.add_row(
            name, str(rows), steps, *("" if loss is None else f"{loss:.3f}" for loss in losses),
            f"{record.training_s:.1f}",
        )  # fmt: skip
    for name, failure in failures.items():
        table.add_row(name, "", "", "", failure.reason, "")
    lines = [Text(f"{name}: {failure.message}") for name, failure in failures.items()]
    if records:
        first, *_ = records.values()
        lines.append(
            Text(
                f"{first.values_at_once:,} trained values each; calibration {first.calibration_s:.1f} s, "
                f"training {sum(record.training_s for record in records.values()):.1f} s together, "
                f"peak memory {bytes_in_words(max(record.peak_memory_bytes for record in records.values()))}"
            )
        )
    return Group(table, *lines)


tune_many = TakesRun(
    _tune_many,
    without=(
        "data", "task", "data_root", "paper_steps", "rows_by_seed", "report_to", "select_by", "samples", "exact_match",
        "max_new_tokens", "forgetting", "evaluate_on",
    ),
)  # fmt: skip
