"""``frozencore inspect``: parse, call, print."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console
from frozencore.files.adapter_folder import adapter_in


def inspect(
    adapter: Annotated[Path, typer.Argument(help="Folder of a run, of a saved frozen-core adapter, or of a basis.")],
    moments: Annotated[
        Path | None, typer.Option(help="Moments file: adds what the basis captured of the gradient.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another adapter or basis: adds the principal angles to its bases.")
    ] = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Print a line for each layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    folder, other = adapter_in(adapter), None if against is None else adapter_in(against)
    from frozencore.adapter.inspection import inspect_adapter
    from frozencore.adapter.saved.folder import read_adapter_or_basis
    from frozencore.calibration.store import load_moments
    from frozencore.cli.layer_tables import inspection_table
    from frozencore.cli.tables import allocation_line
    from frozencore.constructors.options import trained_values

    config, layers = read_adapter_or_basis(folder)
    reports = inspect_adapter(
        config,
        layers,
        moments=load_moments(moments) if moments else None,
        other=None if other is None else read_adapter_or_basis(other)[1],
    )
    if as_json:
        sys.stdout.write(json.dumps({name: asdict(report) for name, report in reports.items()}, indent=2) + "\n")
    else:
        console.print(inspection_table(reports, every_layer=all_layers))
        if config.rank_budget is not None:
            console.print(allocation_line(trained_values(config.rank_budget), config.rank_pattern), highlight=False)
        saved = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        console.print(f"Saved in {saved:,} bytes.", highlight=False)
