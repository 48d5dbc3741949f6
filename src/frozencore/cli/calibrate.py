"""``frozencore calibrate``: compute moments and bases of a model on some rows, without training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group

from frozencore.cli.console import console
from frozencore.cli.flags import TakesRun
from frozencore.cli.tune_many import TENANTS
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import ADAPTER, BASIS, MOMENTS_FILE, RECORD, require_new
from frozencore.tune.locate import require_files, require_tenant_files

if TYPE_CHECKING:
    from frozencore.adapter.calibrate import Calibration
    from frozencore.cli.inspect import Column


def _calibrate(
    config: RunConfig,
    output: Annotated[
        Path,
        typer.Option(
            "--out",
            "--output",
            help="New folder for the basis, the adapter and the moments (no moments with --memory-budget).",
        ),
    ],
    tenants: Annotated[
        Path | None,
        typer.Option(
            help=f"{TENANTS} In place of --data: calibrate one basis on --calibration-size rows of each tenant.",
            rich_help_panel="Rows",
        ),
    ] = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Print a line for each layer.")] = False,
) -> None:
    (require_files if tenants is None else require_tenant_files)(config)
    require_new(output, RECORD, MOMENTS_FILE if config.method.calibration.memory_budget is None else ADAPTER)
    from frozencore.cli.display import StageDisplay

    with warnings.catch_warnings(record=True) as caught, StageDisplay(console) as progress:
        from frozencore.tune.calibrate_only import execute_calibration

        progress.started()
        warnings.simplefilter("always")
        calibration = execute_calibration(config, output, progress, of_tenants=tenants is not None)
    for told in sorted({str(one.message) for one in caught if one.category is UserWarning}):
        console.print(f"Warning: {told}", style="yellow")
    console.print(calibration_summary(calibration, every_layer=all_layers))
    moments = f"   Moments: {output / MOMENTS_FILE}" if (output / MOMENTS_FILE).exists() else ""
    console.print(f"Basis: {output / BASIS}   Adapter: {output / ADAPTER}{moments}")


def calibration_summary(calibration: Calibration, *, every_layer: bool = False) -> Group:
    """Show the result of calibration: the spread over the layers, or a line for each layer."""
    from frozencore.cli.inspect import layer_table

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
    return layer_table(f"Calibration, {calibration.time_s:.1f} s", list(found), columns, every_layer=every_layer)


calibrate = TakesRun(
    _calibrate,
    without=(
        "basis", "learning_rate", "warmup", "epochs", "batch_size", "accumulation", "save_steps", "report_to",
        "patience", "samples", "exact_match", "forgetting",
    ),
)  # fmt: skip
