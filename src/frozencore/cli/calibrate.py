"""``frozencore calibrate``: compute moments and bases of a model on some rows, without training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group

from frozencore.cli.console import console
from frozencore.cli.flags import OF_TRAINING, TakesOptions
from frozencore.cli.tune_many import TENANTS
from frozencore.errors import ConfigError
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.many.tenants import refuse_tenants_early
from frozencore.tune.run.refuse_early import refuse_early
from frozencore.tune.run.run_folder import ADAPTER, BASIS, MOMENTS_FILE, RECORD, require_new

if TYPE_CHECKING:
    from frozencore.adapter.bases.calibrate import Calibration
    from frozencore.cli.inspect import Column


def _calibrate(
    config: RunConfig,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "--out",
            help="New folder for the basis, the adapter and the moments (no moments with --memory-budget).",
        ),
    ],
    tenants: Annotated[
        Path | None,
        typer.Option(
            help=f"{TENANTS} In place of --data: choose one basis that fits all tenants as well as possible, from "
            "--calibration-size rows of each."
        ),
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="As --tenants, but the groups are the rows of --data with the same value in this column.",
        ),
    ] = None,
    grow: Annotated[
        str | None,
        typer.Option(
            metavar="BASIS",
            help="A saved basis to widen for the rows, in place of a new one. Adapters on it keep their outputs.",
        ),
    ] = None,
    by: Annotated[int, typer.Option(help="With --grow: new directions on each side.")] = 8,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Print a line for each layer.")] = False,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="Print a line for each tenant.")] = False,
) -> None:
    if group_by is not None and (tenants is not None or grow is not None):
        other = "--tenants" if tenants is not None else "--grow"
        raise ConfigError(
            f"--group-by makes the groups of a new basis from a column, but {other} came too. Leave one out."
        )
    if grow is not None:
        config = config.model_copy(update={"basis": grow})
    (refuse_early if tenants is None else refuse_tenants_early)(config)
    has_groups = tenants is not None or group_by is not None
    has_moments = config.memory_budget is None and not has_groups and grow is None
    require_new(output, RECORD, MOMENTS_FILE if has_moments else ADAPTER)
    from frozencore.cli.display import StageDisplay

    with warnings.catch_warnings(record=True) as caught, StageDisplay(console) as progress:
        from frozencore.tune.run.calibrate_only import (
            execute_calibration,
            execute_calibration_of_groups,
            execute_growth,
        )

        progress.started()
        warnings.simplefilter("always")
        if grow is not None:
            calibration = execute_growth(config, output, progress, by=by, of_tenants=tenants is not None)
        elif has_groups:
            calibration = execute_calibration_of_groups(config, output, progress, group_by=group_by)
        else:
            calibration = execute_calibration(config, output, progress)
    for told in sorted({str(one.message) for one in caught if one.category is UserWarning}):
        console.print(f"Warning: {told}", style="yellow")
    console.print(calibration_summary(calibration, every_layer=all_layers))
    if calibration.shares:
        from frozencore.cli.shares import shares_table

        console.print(shares_table(calibration.shares, every_tenant=all_tenants))
    moments = f"   Moments: {output / MOMENTS_FILE}" if (output / MOMENTS_FILE).exists() else ""
    console.print(f"Basis: {output / BASIS}   Adapter: {output / ADAPTER}{moments}")


def calibration_summary(calibration: Calibration, *, every_layer: bool = False) -> Group:
    """Show the result of calibration: the spread over the layers, or a line for each layer."""
    from frozencore.cli.inspect import by_layer, legend, spread

    found = calibration.layers
    ends = [(layer.spectrum[0], layer.spectrum[-1]) if layer.spectrum else (None, None) for layer in found.values()]
    columns: dict[str, Column] = {
        "tokens": [layer.num_tokens for layer in found.values()],
        "rank": [layer.rank for layer in found.values()],
        "effective": [layer.effective_rank for layer in found.values()],
        "σ₁": [first for first, _ in ends],
        "σ_r": [last for _, last in ends],
        "max/med a": [layer.input_spread for layer in found.values()],
        "max/med d": [layer.error_spread for layer in found.values()],
    }
    title = f"Calibration, {calibration.time_s:.1f} s"
    table = by_layer(title, list(found), columns) if every_layer else spread(title, list(found), columns)
    return Group(table, legend(columns))


calibrate = TakesOptions(_calibrate, without=OF_TRAINING, instead={"tenants": "data"})
