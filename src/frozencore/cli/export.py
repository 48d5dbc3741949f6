"""``frozencore export`` and ``merge``: adapters in forms that are served or added."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from frozencore.cli.display import console
from frozencore.cli.flags import flag
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import PEFT_TYPE, WEIGHTS_FILE, adapter_in, folder_of, read_config
from frozencore.files.atomic_write import check_output, require_writable
from frozencore.maths.quantise import BITS
from frozencore.quiet import quiet_loading
from frozencore.text import one_line, unknown_name
from frozencore.tune.locate import model_location, require_model

if TYPE_CHECKING:
    import torch

FORMS = "lora", "merged", "basis-model", "tenant", "core", "onnx", "onnx-adapter", "link", "qr"
FILES = "onnx-adapter", "qr"
BITS_OF = {"core": BITS, "link": (None, *BITS), "qr": (None, *BITS), "onnx": (None, 8, 4)}


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
            help="Bits of a value: of a core (core, link, qr) 8, 4 or 2; of the base weights (onnx) 8 or 4. Default: 4 "
            "in a link or QR code, float32 in ONNX."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing export.")] = False,
) -> None:
    if to not in FORMS:
        raise ConfigError(unknown_name("export", to, FORMS))
    if rank is not None and to != "lora":
        raise ConfigError(f"--rank is for a LoRA, and --to {to} has none: leave it out, or give --to lora.")
    if bits not in BITS_OF.get(to, (None,)):
        known = ", ".join(str(each) for each in BITS_OF.get(to, ()) if each is not None)
        raise ConfigError(f"--to {to} takes {f'--bits {known}' if known else 'no --bits'}, but --bits {bits} came.")
    if (output is None) != (to == "link"):
        raise ConfigError(
            f"--to {to} {'prints a link and writes' if to == 'link' else 'writes to --out, but'} nothing."
        )
    if with_code and to != "basis-model":
        raise ConfigError(f"--with-code is for a basis model, and --to {to} has no code: leave it out.")
    if base is not None and to != "onnx-adapter":
        require_model(base)
        base = model_location(base)
    folder = adapter_in(folder_of(adapter))
    if output is not None and to in FILES:
        _check_file(output, overwrite)
    elif output is not None:
        check_output(output, overwrite=overwrite, reads=folder)
    with quiet_loading():
        if output is None:
            lines = list(_link(folder, bits or 4))
        elif to == "qr":
            lines = list(_qr(folder, output, bits or 4))
        elif to == "onnx-adapter":
            lines = list(_onnx_adapter(folder, output, base, dtype))
        elif to == "onnx":
            lines = list(_onnx(folder, output, base, dtype, bits, overwrite))
        elif to == "lora":
            lines = list(_lora(folder, output, base, dtype, rank, overwrite))
        elif to == "merged":
            lines = list(_merged(folder, output, base, dtype, overwrite))
        elif to == "basis-model":
            lines = list(_basis_model(folder, output, base, dtype, with_code, overwrite))
        elif bits is not None:
            lines = list(_core(folder, output, bits, overwrite))
        else:
            lines = list(_tenant(folder, output, base, dtype, overwrite))
    for line in lines:
        console.print(line, soft_wrap=True)


def _check_file(output: Path, overwrite: bool) -> None:
    require_writable(output.absolute().parent)
    if output.is_dir() or (output.exists() and not overwrite):
        raise ArtifactError(
            f"{output} is there already. Choose another file, or allow it to be overwritten (--overwrite)."
        )


def _factor_dtype(name: str) -> torch.dtype:
    import torch

    return torch.float32 if name == "auto" else getattr(torch, name)


def _lora(
    adapter: Path, output: Path, base: str | None, dtype: str, rank: int | None, overwrite: bool
) -> Iterator[str]:
    from frozencore.adapter.export.lora import export_lora

    lora = export_lora(adapter, output, base=base, dtype=_factor_dtype(dtype), rank=rank, overwrite=overwrite)
    zero = f" and {len(lora.zero_layers)} of zeros that engines pack with them" if lora.zero_layers else ""
    yield f"LoRA: {lora.directory}, rank {lora.rank}, {len(lora.layers)} layers{zero}"
    if lora.error is not None:
        yield f"Of the adapter's update, {lora.error:.2%} (Frobenius norm) does not fit into that rank."
    if lora.fan_in_fan_out:
        yield "PEFT alone loads a LoRA of Conv1D layers right, llama.cpp transposes it: for an engine, --to merged."
    else:
        yield _for_vllm(lora.rank, "--rank 512 cuts it")


def _merged(adapter: Path, output: Path, base: str | None, dtype: str, overwrite: bool) -> Iterator[str]:
    from frozencore.adapter.export.base_model import export_merged

    yield f"Merged model: {export_merged(adapter, output, base=base, dtype=dtype, overwrite=overwrite)}"
    yield "It is a plain model folder: transformers and every engine that serves its base model can load it."


def _basis_model(
    adapter: Path, output: Path, base: str | None, dtype: str, with_code: bool, overwrite: bool
) -> Iterator[str]:
    from frozencore.adapter.export.basis_model import export_basis_model
    from frozencore.adapter.export.serving import VLLM_CPU_HEADS, head_size

    model = export_basis_model(adapter, output, base=base, dtype=dtype, with_code=with_code, overwrite=overwrite)
    low, high = min(model.ranks.values()), max(model.ranks.values())
    ranks = f"rank {low}" if low == high else f"ranks {low} to {high}"
    yield f"Basis model: {model.directory}, {ranks}, {len(model.ranks)} layers, basis {model.basis_id}"
    code = " --trust-remote-code" if with_code else ""
    yield _for_vllm(high, "PEFT loads them all", str(model.directory), code)
    if not with_code:
        yield "  with VLLM_PLUGINS=lora_filesystem_resolver,frozencore_basis_model (docs/many-tenants.md)"
    if (size := head_size(model.directory)) not in (None, *VLLM_CPU_HEADS):
        known = ", ".join(map(str, VLLM_CPU_HEADS))
        yield f"vLLM's CPU build refuses requests to this model: its heads have {size} values, not one of {known}."
    yield f"Tenants: frozencore export ADAPTER --to tenant --base {model.directory} --out TENANT"


def _tenant(adapter: Path, output: Path, base: str | None, dtype: str, overwrite: bool) -> Iterator[str]:
    from frozencore.adapter.export.basis_model import export_tenant

    tenant = export_tenant(adapter, output, basis_model=base, dtype=_factor_dtype(dtype), overwrite=overwrite)
    compared = f"as {base} has it" if base else "not compared, and not found on demand: name its model with --base"
    layers = f"rank {tenant.rank}, {len(tenant.layers)} layers"
    yield f"Tenant: {tenant.directory}, {layers}, on the basis {tenant.basis_id} ({compared})"
    yield _for_vllm(tenant.rank, "PEFT loads it", base or "SHOP")


def _core(adapter: Path, output: Path, bits: int, overwrite: bool) -> Iterator[str]:
    from frozencore.adapter.folders import read_adapter

    saved = read_adapter(adapter)
    saved.write(output, saved.core, bits=bits, overwrite=overwrite)
    before, after = ((folder / WEIGHTS_FILE).stat().st_size for folder in (adapter, output))
    yield f"Core: {output}, {len(saved.core.values):,} values of {bits} bits, {after:,} bytes ({before:,} before)"
    yield "It loads as the adapter does. Score it before you use it: `frozencore evaluate`."


def _for_vllm(rank: int, way_out: str, basis_model: str | None = None, code: str = "") -> str:
    """How vLLM is started for adapters of a rank; those of a basis model have their values in its ``core`` layers."""
    from frozencore.adapter.export.serving import VLLM_MAX_RANKS, vllm_max_rank

    if (admitted := vllm_max_rank(rank)) is None:
        return f"vLLM serves ranks of {VLLM_MAX_RANKS[-1]} at most, not {rank}; {way_out}."
    if basis_model is None:
        return f"vLLM: --enable-lora --max-lora-rank {admitted}"
    server = f"python -m vllm.entrypoints.openai.api_server --model {basis_model}"
    return f"vLLM: {server} --enable-lora --max-lora-rank {admitted} --lora-target-modules core{code}"


def _onnx(
    adapter: Path, output: Path, base: str | None, dtype: str, bits: int | None, overwrite: bool
) -> Iterator[str]:
    from frozencore.adapter.export.onnx import export_onnx

    model = export_onnx(adapter, output, base=base, bits=bits, dtype=_factor_dtype(dtype), overwrite=overwrite)
    size = sum(file.stat().st_size for file in output.iterdir())
    yield f"ONNX model: {model.directory}, {len(model.ranks)} layers, {size:,} bytes"
    yield f"A core is its input {model.core_input}; without one it is the base model."
    yield f"Tenants: frozencore export ADAPTER --to onnx-adapter --base {model.directory} --out TENANT.onnx_adapter"


def _onnx_adapter(adapter: Path, output: Path, base: str | None, dtype: str) -> Iterator[str]:
    from frozencore.adapter.export.onnx import export_onnx_adapter

    size = export_onnx_adapter(adapter, output, model=base, dtype=_factor_dtype(dtype))
    compared = f"its basis is that of {base}" if base else "the runtime compares its basis"
    yield f"ONNX adapter: {output}, {size:,} bytes ({compared})"


def _link(adapter: Path, bits: int) -> Iterator[str]:
    from frozencore.adapter.export.link import core_fragment

    yield core_fragment(adapter, bits)


def _qr(adapter: Path, output: Path, bits: int) -> Iterator[str]:
    from frozencore.adapter.export.link import export_qr

    yield f"QR code: {output}, a core of {bits} bits in {export_qr(adapter, output, bits):,} bytes"


def merge(
    adapters: Annotated[
        list[str], typer.Argument(help="Folders of runs; folders or hub ids of adapters; on one basis.")
    ],
    output: Annotated[Path, typer.Option("--out", "--output", help="New folder.")],
    weights: Annotated[
        str | None, typer.Option(help="A weight for each, separated by commas; may be negative. Default: their mean.")
    ] = None,
) -> None:
    try:
        shares = None if weights is None else [float(part) for part in weights.split(",")]
    except ValueError as error:
        raise ConfigError(f"--weights are numbers separated by commas, but {weights!r} came.") from error
    folders = [adapter_in(folder_of(adapter)) for adapter in adapters]
    check_output(output, overwrite=None, reads=folders[0])
    for folder in folders:
        if (kind := read_config(folder).get("peft_type")) != PEFT_TYPE:
            raise ArtifactError(
                f"A sum is that of cores on one basis, but {folder} holds a {one_line(kind, 40)} adapter. `frozencore "
                "compress` makes one basis of LoRAs, and a core of each."
            )
    from frozencore.adapter.folders import merge_adapters

    merge_adapters(folders, output, weights=shares)
    console.print(f"Adapter: {output}   {sum(file.stat().st_size for file in output.iterdir()):,} bytes")
