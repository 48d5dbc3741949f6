"""The forms of an export: each writes its folder, and yields lines on what was written and how it is served."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import torch

from frozencore.adapter.export.basis_model import export_basis_model, export_tenant
from frozencore.adapter.export.link import core_fragment, export_qr
from frozencore.adapter.export.lora import export_lora
from frozencore.adapter.export.merged import export_merged
from frozencore.adapter.export.onnx import export_onnx, export_onnx_adapter
from frozencore.adapter.export.serving import VLLM_CPU_HEADS, VLLM_MAX_RANKS, head_size, vllm_max_rank
from frozencore.adapter.folders import SavedAdapter, read_adapter
from frozencore.files.names import WEIGHTS_FILE
from frozencore.maths.quantise import default_bits
from frozencore.tune.load import quiet_loading
from frozencore.tune.stop_tokens import add_stop_tokens


def export_as(
    to: str,
    folder: Path,
    output: Path | None,
    base: str | None,
    dtype: str,
    *,
    rank: int | None,
    with_code: bool,
    bits: int | None,
    overwrite: bool,
) -> list[str]:
    """Export an adapter; the options are those of the verb, which has checked that they fit the form."""
    with quiet_loading():
        if output is None:
            return [core_fragment(folder, bits or _bits_of(read_adapter(folder)))]
        if to == "qr":
            return list(qr(folder, output, bits or _bits_of(read_adapter(folder))))
        if to == "onnx-adapter":
            return list(onnx_adapter(folder, output, base, dtype))
        if to == "onnx":
            return list(onnx(folder, output, base, dtype, bits, overwrite))
        if to == "lora":
            return list(lora(folder, output, base, dtype, rank, overwrite))
        if to == "merged":
            return list(merged(folder, output, base, dtype, overwrite))
        if to == "basis-model":
            return list(basis_model(folder, output, base, dtype, with_code, overwrite))
        if to == "tenant":
            return list(tenant(folder, output, base, dtype, overwrite))
        return list(core(folder, output, bits, overwrite))


def _factor_dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "auto" else getattr(torch, name)


def lora(adapter: Path, output: Path, base: str | None, dtype: str, rank: int | None, overwrite: bool) -> Iterator[str]:
    done = export_lora(adapter, output, base=base, dtype=_factor_dtype(dtype), rank=rank, overwrite=overwrite)
    zero = f" and {len(done.zero_layers)} of zeros that engines pack with them" if done.zero_layers else ""
    yield f"LoRA: {done.directory}, rank {done.rank}, {len(done.layers)} layers{zero}"
    if done.error is not None:
        yield f"Of the adapter's update, {done.error:.2%} (Frobenius norm) does not fit into that rank."
    if not done.compared:
        yield "Not compared with its base model, which cannot be read here: give it with --base, or try the LoRA on it."
    if done.fan_in_fan_out:
        yield "PEFT alone loads a LoRA of Conv1D layers right, llama.cpp transposes it: for an engine, --to merged."
    else:
        yield _for_vllm(done.rank, "--rank 512 cuts it")


def merged(adapter: Path, output: Path, base: str | None, dtype: str, overwrite: bool) -> Iterator[str]:
    yield f"Merged model: {export_merged(adapter, output, base=base, dtype=dtype, overwrite=overwrite)}"
    yield "It is a plain model folder: transformers and every engine that serves its base model can load it."
    yield from _stops(output)


def basis_model(
    adapter: Path, output: Path, base: str | None, dtype: str, with_code: bool, overwrite: bool
) -> Iterator[str]:
    done = export_basis_model(adapter, output, base=base, dtype=dtype, with_code=with_code, overwrite=overwrite)
    low, high = min(done.ranks.values()), max(done.ranks.values())
    ranks = f"rank {low}" if low == high else f"ranks {low} to {high}"
    yield f"Basis model: {done.directory}, {ranks}, {len(done.ranks)} layers, basis {done.basis_id}"
    code = " --trust-remote-code" if with_code else ""
    yield _for_vllm(high, "PEFT loads them all", str(done.directory), code)
    if not with_code:
        yield "  with VLLM_PLUGINS=frozencore_basis_model VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 FROZENCORE_TENANTS=TENANTS"
    if (size := head_size(done.directory)) not in (None, *VLLM_CPU_HEADS):
        known = ", ".join(map(str, VLLM_CPU_HEADS))
        yield f"vLLM's CPU build refuses requests to this model: its heads have {size} values, not one of {known}."
    yield from _stops(output)
    yield "TENANTS is the folder that tune-many, tune or compress wrote. More flags, as for a CPU: docs/serving.md."
    yield "Ask tenants that were trained on a chat template at /v1/chat/completions, others at /v1/completions."


def tenant(adapter: Path, output: Path, base: str | None, dtype: str, overwrite: bool) -> Iterator[str]:
    done = export_tenant(adapter, output, basis_model=base, dtype=_factor_dtype(dtype), overwrite=overwrite)
    compared = f"as {base} has it" if base else "not compared, and not found on demand: name its model with --base"
    layers = f"rank {done.rank}, {len(done.layers)} layers"
    yield f"Tenant: {done.directory}, {layers}, on the basis {done.basis_id} ({compared})"
    yield _for_vllm(done.rank, "PEFT loads it", base or "SHOP")


def core(adapter: Path, output: Path, bits: int | None, overwrite: bool) -> Iterator[str]:
    saved = read_adapter(adapter)
    bits = bits or _bits_of(saved)
    scores: dict[str, float | str] | None = None if bits >= saved.core.bits else {}  # fewer bits have other scores
    saved.write(output, saved.core.in_bits(bits, saved.ranks), scores=scores, overwrite=overwrite)
    before, after = ((folder / WEIGHTS_FILE).stat().st_size for folder in (adapter, output))
    yield f"Core: {output}, {len(saved.core.values):,} values of {bits} bits, {after:,} bytes ({before:,} before)"
    yield "It loads as the adapter does. Score it before you use it: `frozencore evaluate`."


def _bits_of(saved: SavedAdapter) -> int:
    """The bits at which a core is written where no --bits says."""
    return default_bits(saved.config.r, saved.core.bits)


def _stops(folder: Path) -> Iterator[str]:
    """Let the exported model stop where its chat template ends an answer."""
    if added := add_stop_tokens(folder):
        yield f"Generation stops at {', '.join(added)} too: so answers on the chat template end."


def _for_vllm(rank: int, way_out: str, basis_model: str | None = None, code: str = "") -> str:
    """How vLLM is started for adapters of a rank; those of a basis model have their values in its ``core`` layers."""
    if (admitted := vllm_max_rank(rank)) is None:
        return f"vLLM serves ranks of {VLLM_MAX_RANKS[-1]} at most, not {rank}; {way_out}."
    if basis_model is None:
        return f"vLLM: --enable-lora --max-lora-rank {admitted}"
    server = f"python -m vllm.entrypoints.openai.api_server --model {shlex.quote(basis_model)}"
    return f"vLLM: {server} --enable-lora --max-lora-rank {admitted} --lora-target-modules core --max-loras 64{code}"


def onnx(adapter: Path, output: Path, base: str | None, dtype: str, bits: int | None, overwrite: bool) -> Iterator[str]:
    done = export_onnx(adapter, output, base=base, bits=bits, dtype=_factor_dtype(dtype), overwrite=overwrite)
    size = sum(file.stat().st_size for file in output.iterdir())
    yield f"ONNX model: {done.directory}, {len(done.ranks)} layers, {size:,} bytes"
    yield f"A core is its input {done.core_input}; without one it is the base model."
    place = shlex.quote(str(done.directory))
    yield f"Tenants: frozencore export ADAPTER --to onnx-adapter --base {place} --out TENANT.onnx_adapter"


def onnx_adapter(adapter: Path, output: Path, base: str | None, dtype: str) -> Iterator[str]:
    size = export_onnx_adapter(adapter, output, model=base, dtype=None if dtype == "auto" else _factor_dtype(dtype))
    compared = f"its basis is that of {base}" if base else "the runtime compares its basis"
    yield f"ONNX adapter: {output}, {size:,} bytes ({compared})"


def qr(adapter: Path, output: Path, bits: int) -> Iterator[str]:
    yield f"QR code: {output}, a core of {bits} bits in {export_qr(adapter, output, bits):,} bytes"
