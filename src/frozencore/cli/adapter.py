"""``frozencore adapter``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console
from frozencore.errors import ConfigError
from frozencore.files.adapter_folder import adapter_in

adapter_app = typer.Typer(no_args_is_help=True)

Adapter = Annotated[Path, typer.Argument(help="Folder of a run or of a saved frozen-core adapter.")]
NewFolder = Annotated[Path, typer.Option("--output", "--out", help="New folder.")]


@adapter_app.command()
def pack(
    adapter: Adapter,
    output: NewFolder,
    basis: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of the basis that it was trained on. Default: the folder basis beside --output, "
            "written from the adapter if it is not there."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the cores: auto (as saved), float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Write an adapter as its cores alone: it needs the basis beside it from then on."""
    folder = adapter_in(adapter)
    from frozencore.adapter.saved.pack import pack_adapter
    from frozencore.cli.exporting import read_dtype

    pack_adapter(folder, basis, output, dtype=read_dtype(dtype))
    console.print(_told(output), highlight=False)


@adapter_app.command()
def unpack(
    adapter: Adapter,
    output: NewFolder,
    basis: Annotated[
        str | None, typer.Option(help="Where its basis is. Default: in the folder, beside it, or where it says.")
    ] = None,
) -> None:
    """Write an adapter of cores alone as one that holds its basis."""
    folder = adapter_in(adapter)
    from frozencore.adapter.saved.pack import unpack_adapter

    unpack_adapter(folder, output, basis=basis)
    console.print(_told(output), highlight=False)


def merge(
    adapters: Annotated[list[Path], typer.Argument(help="Folders of runs or of adapters, on one basis.")],
    output: NewFolder,
    weights: Annotated[
        str | None, typer.Option(help="One for each, separated by commas; may be negative. Default: their mean.")
    ] = None,
) -> None:
    """Write the weighted sum of adapters on one basis: the sum of what they do, exactly."""
    folders, shares = [adapter_in(adapter) for adapter in adapters], None if weights is None else _numbers(weights)
    from frozencore.adapter.saved.sums import merge_adapters

    merge_adapters(folders, output, weights=shares)
    console.print(_told(output), highlight=False)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--weights are numbers separated by commas, but {text!r} came.") from error


def _told(folder: Path) -> str:
    return f"Adapter: {folder}   {sum(file.stat().st_size for file in folder.iterdir()):,} bytes"
