"""``frozencore tune-many``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console
from frozencore.cli.run_flags import OF_ONE_TRAINING, TakesRun
from frozencore.tune.rows.row_sources import require_source
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.early import refuse_early
from frozencore.tune.run.many.tenants import find_tenants
from frozencore.tune.run.processes import is_first, joined, refuse_several

_ALONE = tuple(name for name in OF_ONE_TRAINING if name != "save_steps")
NOT_OF_MANY = ("task", "data_root", "evaluate_on", "max_new_tokens", "paper_steps", "select_by", *_ALONE)
TENANTS = "Folder with a row file (as for `tune --data`) for each tenant, named after it; or a YAML file 'name: file'."


def _tune_many(
    config: RunConfig,
    output: Annotated[Path, typer.Option("--output", "--out", help="New folder: NAME/adapter, NAME/result.json.")],
    slots: Annotated[
        int, typer.Option(min=1, help="Tenants that train at once in a process; the others wait for a slot.")
    ] = 64,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what is kept in --output.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Write nothing: say what it would read and train, and show the first row."),
    ] = False,
) -> None:
    refuse_early(config.model_copy(update={"data": None}))
    for file in find_tenants(Path(str(config.data))).values():
        require_source(str(file))
    if dry_run:
        refuse_several("--dry-run")
        _show(config, slots)
        return
    from frozencore.cli.display import StageDisplay, resume_line
    from frozencore.cli.many_tables import tenants_summary
    from frozencore.tune.run.many.execute import execute_many
    from frozencore.tune.run.record import Failure

    if resume:
        console.print(resume_line(output), highlight=False, markup=False)
    with joined(), StageDisplay(console) as stages:
        outcomes = execute_many(config, output, stages, num_slots=slots, resume=resume)
    if not is_first():
        return
    console.print(tenants_summary(outcomes))
    console.print(f"Adapters: {output}/NAME/adapter   Records: {output}/NAME/result.json", highlight=False)
    if any(isinstance(outcome, Failure) for outcome in outcomes.values()):
        raise typer.Exit(1)


def _show(config: RunConfig, slots: int) -> None:
    from frozencore.cli.display import StageDisplay
    from frozencore.cli.dry_run import dry_run_many_lines

    with StageDisplay(console) as progress:
        lines = list(dry_run_many_lines(config, slots, progress))
    for line in lines:
        console.print(line, soft_wrap=True)


tune_many = TakesRun(_tune_many, without=NOT_OF_MANY, required={"data": ("--tenants", TENANTS)})
