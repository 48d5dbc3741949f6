"""``frozencore export``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console
from frozencore.cli.export_options import Wanted
from frozencore.files.adapter_folder import adapter_in, folder_of
from frozencore.quiet import quiet_loading
from frozencore.tune.run.model_names import model_location


def export(
    adapter: Annotated[
        str,
        typer.Argument(help="Folder of a run; folder or hub id of an adapter, or of a basis (for a basis model)."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "--out", help="New folder for the export; a new file for a gguf-lora.")
    ],
    to: Annotated[
        str,
        typer.Option(
            help="lora: an exact LoRA directory. gguf-lora: the same in one file, for llama.cpp beside the base "
            "model's GGUF file. merged: base model plus update. basis-model: base model with P and Q in it, once for "
            "all tenants. tenant: the cores, as a LoRA for the basis model."
        ),
    ] = "lora",
    base: Annotated[
        str | None,
        typer.Option(
            help="Folder, GGUF file or hub id of the base model; default: the one that the adapter names. Of a "
            "tenant: its basis model, to compare the bases."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (of factors float32, of models the base's), float32, ...")] = "auto",
    rank: Annotated[
        int | None, typer.Option(help="Of the LoRA, below the adapter's own; says how much that leaves out.")
    ] = None,
    with_code: Annotated[
        bool,
        typer.Option("--with-code", help="Put its code into a basis model, for engines without frozencore."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    wanted = Wanted(to, base and model_location(base), dtype, rank, with_code, overwrite)
    folder = adapter_in(folder_of(adapter))
    from frozencore.cli.exporting import export_adapter

    with quiet_loading():
        lines = export_adapter(folder, output, wanted)
    for line in lines:
        console.print(line, highlight=False)
