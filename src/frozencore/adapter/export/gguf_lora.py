"""A frozen core as a LoRA in a GGUF file, for llama.cpp's ``--lora`` beside the very file that it was trained on.

llama.cpp names layers by its own scheme (``blk.3.attn_q.weight``). For Llama it also stores the rows of q and k in
another order: within a head, row i of the second half follows row i of the first half. The reason is the rotation: it
pairs neighbouring rows in llama.cpp, and rows half a head apart in transformers. B has the rows of the weight it adds
to, so B is reordered the same way. A is not.

Shapes: m out features, n in features, r rank; ``lora_a`` is r x n, ``lora_b`` m x r, their product s·P R Qᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.adapter.export.lora import lora_factors, to_rank
from frozencore.adapter.export.source import ExportSource, export_source, in_dtype, require_dtype
from frozencore.errors import ArtifactError, ConfigError, ModelError
from frozencore.files.whole_file import whole_file


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's form of a model type of transformers.

    Attributes:
        name: Its own name, which adapter and model file must share.
        pairs_rows: The rows of q and k are in llama.cpp's order.
    """

    name: str
    pairs_rows: bool


# Each is compared with llama.cpp's own converter in tests/engines/test_gguf_lora.py.
ARCHITECTURES = {
    "llama": Architecture("llama", pairs_rows=True),
    "mistral": Architecture("llama", pairs_rows=True),
    "qwen2": Architecture("qwen2", pairs_rows=False),
    "qwen3": Architecture("qwen3", pairs_rows=False),
}


@dataclass(frozen=True)
class GgufLoraExport:
    """The GGUF file that was written.

    Attributes:
        architecture: llama.cpp's name of the base model's architecture.
        rank: The one rank of all layers; smaller cores are zero-padded to it.
        layers: The adapted layers, by transformers' names.
        error: See :class:`frozencore.adapter.export.lora.LoraExport`.
    """

    file: Path
    architecture: str
    rank: int
    layers: tuple[str, ...]
    error: float | None = None


def export_gguf_lora(
    model_or_directory: nn.Module | str | Path,
    out: str | Path,
    *,
    adapter_name: str | None = None,
    base: nn.Module | str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    overwrite: bool = False,
) -> GgufLoraExport:
    """Write a frozen-core adapter as a GGUF file that llama.cpp applies to the base model's own GGUF file.

    Args:
        model_or_directory, adapter_name, dtype, rank: See :func:`frozencore.adapter.export.lora.export_lora`.
        base: With a folder: the base model, its folder, its GGUF file or its hub id; by default what the adapter names,
            if it is on this machine. Its weights are not read.
        overwrite: Replace a file that is there.

    Raises:
        ArtifactError: The adapter is damaged or of another base model, or ``out`` exists.
        ConfigError: The base model is not known, or the adapter holds what no LoRA can hold.
        ModelError: The package ``gguf`` is missing, or llama.cpp's names and row order of the model are not known.
    """
    out = Path(out)
    require_dtype(dtype, "llama.cpp reads")
    if out.is_dir() or (out.exists() and not overwrite):
        raise ArtifactError(f"{out} is there already. Choose another file, or allow a file to be overwritten.")
    try:
        import gguf
    except ImportError as missing:
        raise ModelError("To write a GGUF file takes the package gguf: pip install 'frozencore[gguf]'.") from missing
    adapter = export_source(model_or_directory, adapter_name, base)
    if adapter.base is None:
        raise ConfigError(
            f"llama.cpp's order of rows depends on the base model, and {model_or_directory} names none that lies here: "
            "give base=, its GGUF file, folder or hub id (--base)."
        )
    config = adapter.base.config
    kept = ARCHITECTURES.get(config.model_type)
    if kept is None:
        raise ModelError(
            f"A GGUF LoRA is written for {', '.join(ARCHITECTURES)}, but the base model is {config.model_type!r}. "
            "Export a LoRA, and let llama.cpp's convert_lora_to_gguf.py convert it."
        )
    names = _names(gguf, kept, adapter, config)
    adapter, rank, error = to_rank(adapter, rank)
    with whole_file(out) as aside:
        writer = gguf.GGUFWriter(aside, kept.name)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))  # the scale is in B: alpha over rank is one
        number = gguf.GGMLQuantizationType[{torch.float32: "F32", torch.float16: "F16"}.get(dtype, "BF16")]
        for layer, name in names.items():
            A, B = lora_factors(adapter.factors[layer], adapter.scales[layer], rank)
            heads = _paired_heads(layer, kept, config)
            for side, X in (("a", A), ("b", B if heads is None else rows_in_pairs(B, heads))):
                in_dtype(layer, X, dtype)
                values = gguf.quants.quantize(X.float().contiguous().numpy(), number)
                writer.add_tensor(f"{name}.weight.lora_{side}", values, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return GgufLoraExport(out, kept.name, rank, tuple(names), error)


def rows_in_pairs(X: Tensor, num_heads: int) -> Tensor:
    """Rows 0, h/2, 1, h/2 + 1, ... of each head of h rows, as llama.cpp keeps q and k of Llama."""
    return X.reshape(num_heads, 2, -1, X.shape[1]).transpose(1, 2).reshape(X.shape)


def _paired_heads(layer: str, kept: Architecture, config: Any) -> int | None:
    """Heads of a layer whose rows llama.cpp pairs; None where it does not."""
    if not kept.pairs_rows:
        return None
    heads: dict[str, int] = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(layer.rpartition(".")[2])


def _names(gguf: Any, kept: Architecture, adapter: ExportSource, config: Any) -> dict[str, str]:
    """llama.cpp's names of the adapted layers, by transformers' names."""
    assert adapter.base is not None
    scheme = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[kept.name]
    found = gguf.get_tensor_name_map(scheme, config.num_hidden_layers)
    names = {}
    for layer, factors in adapter.factors.items():
        adapter.base.require_layer(layer, (len(factors.P), len(factors.Q)))
        name = found.get_name(layer)
        if name is None or (name == "output" and config.tie_word_embeddings):
            raise ModelError(
                f"llama.cpp has no layer of its own for {layer!r} of {kept.name}. Merge the adapter (--to merged)."
            )
        names[layer] = name
    return names
