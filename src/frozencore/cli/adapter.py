"""``frozencore adapter`` and ``frozencore merge``: adapters stored as cores only, and weighted sums of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from frozencore.cli.console import console
from frozencore.cli.flags import flag
from frozencore.errors import ConfigError
from frozencore.files.adapter_folder import adapter_in
from frozencore.files.whole_file import require_free
from frozencore.tune.locate import require_basis

adapter_app = typer.Typer(no_args_is_help=True)

Adapter = Annotated[Path, typer.Argument(help="Folder of a run or of a saved frozen-core adapter.")]
NewFolder = Annotated[Path, typer.Option("--out", "--output", help="New folder.")]


@adapter_app.command()
def pack(
    adapter: Adapter,
    output: NewFolder,
    basis: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of the basis that the adapter was trained on. Default: the folder basis beside "
            "--out, written from the adapter if missing."
        ),
    ] = None,
    dtype: Annotated[str, flag("dtype", "Dtype of the cores: auto (as saved), float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Write an adapter that holds only its cores; it then needs its basis to be loaded."""
    folder = adapter_in(adapter)
    _require_places(folder, basis, output)
    import torch

    from frozencore.adapter.folders import pack_adapter

    pack_adapter(folder, basis, output, dtype=None if dtype == "auto" else getattr(torch, dtype))
    _print_size("Adapter", output)
    _print_size("Basis", output.parent / "basis" if basis is None else Path(basis))


@adapter_app.command()
def unpack(
    adapter: Adapter,
    output: NewFolder,
    basis: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of its basis. Default: found in the adapter or beside it."),
    ] = None,
) -> None:
    """Write an adapter of cores only as one that includes its basis."""
    folder = adapter_in(adapter)
    _require_places(folder, basis, output)
    from frozencore.adapter.folders import unpack_adapter

    unpack_adapter(folder, output, basis=basis)
    _print_size("Adapter", output)


def merge(
    adapters: Annotated[list[Path], typer.Argument(help="Folders of runs or of adapters, on one basis.")],
    output: NewFolder,
    weights: Annotated[
        str | None, typer.Option(help="A weight for each, separated by commas; may be negative. Default: their mean.")
    ] = None,
) -> None:
    try:
        shares = None if weights is None else [float(part) for part in weights.split(",")]
    except ValueError as error:
        raise ConfigError(f"--weights are numbers separated by commas, but {weights!r} came.") from error
    folders = [adapter_in(adapter) for adapter in adapters]
    _require_places(folders[0], None, output)
    from frozencore.adapter.folders import merge_adapters

    merge_adapters(folders, output, weights=shares)
    _print_size("Adapter", output)


def _require_places(adapter: Path, basis: str | None, output: Path) -> None:
    """Refuse a missing basis and a folder that is in use, before torch is imported."""
    if basis is not None:
        require_basis(basis)
    require_free(output, overwrite=None, reads=adapter)


def _print_size(what: str, folder: Path) -> None:
    if folder.is_dir():  # a basis on the hub is not
        console.print(f"{what}: {folder}   {sum(file.stat().st_size for file in folder.iterdir()):,} bytes")
