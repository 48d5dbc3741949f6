"""What ``frozencore export`` and ``frozencore check`` do and say."""

from __future__ import annotations

from pathlib import Path

import torch

from frozencore.adapter.export.lora import LoraExport, export_lora
from frozencore.adapter.export.merged import export_merged
from frozencore.adapter.export.serving import ENGINES, LoraReport, check_lora_directory
from frozencore.errors import ConfigError
from frozencore.naming import unknown_name

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def export_adapter(
    adapter: Path, output: Path, *, to: str, base: str | None, dtype: str, rank: int | None = None, overwrite: bool
) -> list[str]:
    """Write the export that was asked for; the lines that say what it is.

    Args:
        rank: Of a LoRA; by default the adapter's own.

    Raises:
        FrozenCoreError: An unknown form or dtype, a bad adapter or base model, or a folder in the way.
    """
    own = read_dtype(dtype)
    if to == "lora":
        found = export_lora(adapter, output, base=base, dtype=own or torch.float32, rank=rank, overwrite=overwrite)
        return [*_lora_lines(found), *serving_lines(check_lora_directory(output))]
    if to == "merged":
        if rank is not None:
            raise ConfigError("--rank is of a LoRA, and a merged model has none: leave it out, or --to lora.")
        folder = export_merged(adapter, output, base=base, dtype=dtype, overwrite=overwrite)
        return [
            f"Merged model: {folder}",
            "It is a plain model folder: transformers and every engine of its base take it.",
        ]
    raise ConfigError(unknown_name("export", to, ("lora", "merged")))


def read_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name; None for ``auto``.

    Raises:
        ConfigError: There is none of that name.
    """
    if name != "auto" and name not in DTYPES:
        raise ConfigError(unknown_name("dtype", name, ("auto", *DTYPES)))
    return DTYPES.get(name)


def serving_lines(report: LoraReport) -> list[str]:
    """Which engines take a LoRA directory, and what to change for the others."""
    lines = [f"Taken by: {', '.join(report.engines) or 'no engine'}"]
    lines += [f"- {problem}" for problem in report.problems]
    if "vLLM" in report.engines:
        lines.append(f"vLLM: --enable-lora --max-lora-rank {report.vllm_max_rank}")
    missing = [engine for engine in ENGINES if engine not in report.engines]
    return [*lines, f"Not taken by: {', '.join(missing)}"] if missing else lines


def _lora_lines(found: LoraExport) -> list[str]:
    zero = f" and {len(found.zero_layers)} of zeros that engines pack with them" if found.zero_layers else ""
    lines = [f"LoRA: {found.directory}, rank {found.rank}, {len(found.layers)} layers{zero}"]
    if found.error is not None:
        lines.append(f"Of the adapter's update, {found.error:.2%} (Frobenius norm) does not fit into that rank.")
    return lines
