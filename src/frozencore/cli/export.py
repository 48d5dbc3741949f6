"""``frozencore export``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console


def export(
    adapter: Annotated[Path, typer.Argument(help="Folder of a saved frozen-core adapter.")],
    output: Annotated[Path, typer.Option("--output", "--out", help="New folder for the export.")],
    to: Annotated[str, typer.Option(help="lora: an exact LoRA directory. merged: base model plus update.")] = "lora",
    base: Annotated[
        str | None, typer.Option(help="Folder or hub id of the base model. Default: the one that the adapter names.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (lora: float32, merged: as the base), float32, ...")] = "auto",
    rank: Annotated[
        int | None, typer.Option(help="Of the LoRA, below the adapter's own; says how much that leaves out.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    from frozencore.cli.exporting import export_adapter

    for line in export_adapter(adapter, output, to=to, base=base, dtype=dtype, rank=rank, overwrite=overwrite):
        console.print(line, highlight=False)
