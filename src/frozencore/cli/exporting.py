"""What ``frozencore export`` and ``frozencore check`` do and say."""

from __future__ import annotations

from pathlib import Path

import torch

from frozencore.adapter.export.basis_model import BasisModelExport, export_basis_model
from frozencore.adapter.export.gguf_lora import GgufLoraExport, export_gguf_lora
from frozencore.adapter.export.lora import LoraExport, export_lora
from frozencore.adapter.export.merged import export_merged
from frozencore.adapter.export.serving import ENGINES, LoraReport, check_lora_directory
from frozencore.adapter.export.serving.config_rules import VLLM_MAX_RANKS, vllm_max_rank
from frozencore.adapter.export.tenant import TenantExport, export_tenant
from frozencore.adapter.saved.folder import read_adapter
from frozencore.cli.export_options import Wanted
from frozencore.cli.options import DTYPE_NAMES, require_name

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def export_adapter(adapter: Path, output: Path, wanted: Wanted) -> list[str]:
    """Write the export that was asked for; the lines that say what it is.

    Raises:
        FrozenCoreError: A bad adapter or base model, or a folder in the way.
    """
    own, base, overwrite = read_dtype(wanted.dtype), wanted.base, wanted.overwrite
    if wanted.to == "merged":
        folder = export_merged(adapter, output, base=base, dtype=wanted.dtype, overwrite=overwrite)
        return [
            f"Merged model: {folder}",
            "It is a plain model folder: transformers and every engine of its base take it.",
        ]
    if wanted.to == "basis-model":
        return _basis_model_lines(
            export_basis_model(
                adapter, output, base=base, dtype=wanted.dtype, with_code=wanted.with_code, overwrite=overwrite
            ),
            with_code=wanted.with_code,
        )
    if wanted.to == "tenant":
        tenant = export_tenant(adapter, output, basis_model=base, dtype=own or torch.float32, overwrite=overwrite)
        return [*_tenant_lines(tenant, base), *serving_lines(check_lora_directory(output))]
    if wanted.to == "gguf-lora":
        return _gguf_lines(
            export_gguf_lora(
                adapter, output, base=base, dtype=own or torch.float32, rank=wanted.rank, overwrite=overwrite
            ),
            read_adapter(adapter)[0].base_model_name_or_path,
        )
    found = export_lora(adapter, output, base=base, dtype=own or torch.float32, rank=wanted.rank, overwrite=overwrite)
    return [*_lora_lines(found), *serving_lines(check_lora_directory(output))]


def read_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name; None for ``auto``.

    Raises:
        ConfigError: There is none of that name.
    """
    require_name("dtype", name, DTYPE_NAMES)
    return DTYPES.get(name)


def serving_lines(report: LoraReport) -> list[str]:
    """Which engines take a LoRA directory, and what to change for the others."""
    lines = [f"Taken by: {', '.join(report.engines) or 'no engine'}"]
    lines += [f"- {problem}" for problem in report.problems]
    if "vLLM" in report.engines:
        on_cores = " --lora-target-modules core" if report.is_tenant else ""
        lines.append(f"vLLM: --enable-lora --max-lora-rank {report.vllm_max_rank}{on_cores}")
    missing = [engine for engine in ENGINES if engine not in report.engines]
    return [*lines, f"Not taken by: {', '.join(missing)}"] if missing else lines


def _basis_model_lines(found: BasisModelExport, *, with_code: bool) -> list[str]:
    low, high = min(found.ranks.values()), max(found.ranks.values())
    rank = f"rank {low}" if low == high else f"ranks {low} to {high}"
    admitted = vllm_max_rank(high)
    lines = [f"Basis model: {found.directory}, {rank}, {len(found.ranks)} layers, basis {found.identity[:12]}"]
    if admitted is None:
        return [*lines, f"vLLM serves tenants of rank {VLLM_MAX_RANKS[-1]} at most; PEFT loads them all."]
    code = " --trust-remote-code" if with_code else ""
    return [
        *lines,
        f"vLLM: vllm serve {found.directory} --enable-lora --max-lora-rank {admitted} --lora-target-modules core{code}",
        f"Tenants: frozencore export ADAPTER --to tenant --base {found.directory} --out TENANT",
    ]


def _tenant_lines(found: TenantExport, basis_model: str | None) -> list[str]:
    compared = f"as {basis_model} has it" if basis_model else "not compared: name the basis model with --base"
    layers = f"rank {found.rank}, {len(found.layers)} layers"
    return [f"Tenant: {found.directory}, {layers}, on the basis {found.identity[:12]} ({compared})"]


def _gguf_lines(found: GgufLoraExport, base: str | None) -> list[str]:
    """What was written, and how llama.cpp takes it; its model file is known where it was trained on."""
    model = base if base and base.endswith(".gguf") else "MODEL.gguf"
    lines = [f"LoRA for llama.cpp: {found.file}, rank {found.rank}, {len(found.layers)} layers of {found.architecture}"]
    lines += _left_out(found.error)
    return [*lines, f"llama.cpp: llama-server --model {model} --lora {found.file}"]


def _left_out(error: float | None) -> list[str]:
    if error is None:
        return []
    return [f"Of the adapter's update, {error:.2%} (Frobenius norm) does not fit into that rank."]


def _lora_lines(found: LoraExport) -> list[str]:
    zero = f" and {len(found.zero_layers)} of zeros that engines pack with them" if found.zero_layers else ""
    lines = [f"LoRA: {found.directory}, rank {found.rank}, {len(found.layers)} layers{zero}"]
    return [*lines, *_left_out(found.error)]
