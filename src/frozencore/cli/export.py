"""``frozencore export`` and ``merge``: adapters in forms that are served or added."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from frozencore.cli.display import console
from frozencore.cli.flags import flag
from frozencore.constructors import BasisOptions
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import find_adapter, read_config
from frozencore.files.atomic_write import check_output, require_writable
from frozencore.maths.quantise import BITS, default_bits
from frozencore.text import unknown_name
from frozencore.tune.locate import model_location, require_model


class Form(NamedTuple):
    """What a form of an export writes, and the flags that it reads."""

    reads: tuple[str, ...]
    bits: tuple[int | None, ...] = (None,)
    writes: Literal["a folder", "a file", "nothing"] = "a folder"


FORMS = {
    "lora": Form(("base", "dtype", "overwrite", "rank")),
    "merged": Form(("base", "dtype", "overwrite")),
    "basis-model": Form(("base", "dtype", "overwrite", "with-code")),
    "tenant": Form(("base", "dtype", "overwrite")),
    "core": Form(("overwrite",), (None, 32, *BITS)),
    "onnx": Form(("base", "dtype", "overwrite"), (None, 8, 4)),
    "onnx-adapter": Form(("base", "dtype", "overwrite"), writes="a file"),
    "link": Form((), (None, *BITS), writes="nothing"),
    "qr": Form(("overwrite",), (None, *BITS), writes="a file"),
}


def export(
    adapter: Annotated[
        str,
        typer.Argument(help="Folder of a run; folder or hub id of an adapter, or of a basis (for a basis model)."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--out", "--output", help="New folder for the export; for onnx-adapter and qr a file, for link nothing."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help="lora: an exact LoRA directory. merged: base model plus update. basis-model: the base model with P "
            "and Q, once for all tenants. tenant: the cores, as a LoRA for the basis model. core: the adapter with "
            "values of fewer bits. onnx: the base model with P and Q for ONNX Runtime. onnx-adapter: the core, for "
            "that model. link, qr: the core as a fragment of a link, which is printed, or as the picture of a QR code."
        ),
    ] = "lora",
    base: Annotated[
        str | None,
        typer.Option(
            help="Folder, GGUF file or hub id of the base model. Default: the one that the adapter names. For a "
            "tenant: its basis model, as the engine's --model will name it. For an onnx-adapter: its ONNX model, to "
            "compare the bases."
        ),
    ] = None,
    dtype: Annotated[
        str, flag("dtype", "auto (factors float32, models as their base), float32, bfloat16 or float16.")
    ] = "auto",
    rank: Annotated[
        int | None,
        typer.Option(help="Rank of the LoRA, below the adapter's own; prints how much of the update is lost."),
    ] = None,
    with_code: Annotated[
        bool,
        typer.Option("--with-code", help="Include the model's code in a basis model, for engines without frozencore."),
    ] = False,
    bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of a value: of a core (core, link, qr) 8, 4 or 2, for core also 32; of the base weights (onnx) "
            "8 or 4. Default: for a core as of tune, or fewer if it has fewer; float32 in ONNX."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing export.")] = False,
) -> None:
    if to not in FORMS:
        raise ConfigError(unknown_name("export", to, FORMS))
    form = FORMS[to]
    is_given = {
        "base": base is not None, "dtype": dtype != "auto", "overwrite": overwrite, "rank": rank is not None,
        "with-code": with_code,
    }  # fmt: skip
    for name in is_given:
        if is_given[name] and name not in form.reads:
            readers = ", ".join(other for other, each in FORMS.items() if name in each.reads)
            raise ConfigError(f"--{name} is for --to {readers}, but --to {to} was given: leave one of them out.")
    if bits not in form.bits:
        known = ", ".join(str(each) for each in form.bits if each is not None)
        raise ConfigError(
            f"--to {to} takes {f'--bits {known}' if known else 'no --bits'}, but --bits {bits} was given."
        )
    if (output is None) != (form.writes == "nothing"):
        raise ConfigError(
            f"--to {to} writes {form.writes}. Give --out, its place."
            if output is None
            else f"--to {to} prints its export and writes nothing: leave --out out."
        )
    if base is not None and to != "onnx-adapter":
        require_model(base)
        base = model_location(base)
    folder = find_adapter(adapter, with_tokenizer=True)
    if output is not None and form.writes == "a file":
        _check_file(output, overwrite)
    elif output is not None:
        check_output(output, overwrite=overwrite, reads=[folder, base])
    from frozencore.cli.export_forms import export_as

    lines = export_as(to, folder, output, base, dtype, rank=rank, with_code=with_code, bits=bits, overwrite=overwrite)
    for line in lines:
        console.print(line, soft_wrap=True)


def _check_file(output: Path, overwrite: bool) -> None:
    require_writable(output.absolute().parent)
    if output.is_dir() or (output.exists() and not overwrite):
        raise ArtifactError(
            f"{output} is there already. Choose another file, or allow it to be overwritten (--overwrite)."
        )


def merge(
    adapters: Annotated[
        list[str], typer.Argument(help="Folders of runs; folders or hub ids of adapters; on one basis.")
    ],
    output: Annotated[Path, typer.Option("--out", "--output", help="New folder.")],
    weights: Annotated[
        str | None, typer.Option(help="A weight for each, separated by commas; may be negative. Default: their mean.")
    ] = None,
    bits: Annotated[int | None, flag("bits")] = None,
) -> None:
    try:
        shares = None if weights is None else [float(part) for part in weights.split(",")]
    except ValueError as error:
        raise ConfigError(f"--weights are numbers separated by commas, but {weights!r} was given.") from error
    folders = [find_adapter(adapter, with_tokenizer=True) for adapter in adapters]
    check_output(output, overwrite=None, reads=folders)
    from frozencore.adapter.folders import merge_adapters

    bits = bits or default_bits(read_config(folders[0]).get("r", BasisOptions.r))
    merge_adapters(folders, output, weights=shares, bits=bits)
    console.print(f"Adapter: {output}   {sum(file.stat().st_size for file in output.iterdir()):,} bytes")
    if bits < 32:
        console.print(f"The sum is rounded to {bits} bits a value; with --bits 32 it is exact.")
