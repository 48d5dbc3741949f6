"""A frozen core as a plain LoRA directory: ``A = Qᵀ``, ``B = s·P R``, so that ``B A = s·P R Qᵀ`` exactly.

With a lower rank, the result is the best LoRA of that rank in Frobenius norm: the leading singular triples.

Shapes: m out features, n in features, r rank; ``lora_A.weight`` is r x n, ``lora_B.weight`` m x r.
Stock PEFT, vLLM, SGLang and llama.cpp all read the directory: one rank, ``lora_alpha`` equal to it, plain
float factors in pairs, and all layers that engines pack together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad

from frozencore.adapter.basis import ranks_of, require_set
from frozencore.adapter.card import num_tokens, write_model_card
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.core import BASE, Core
from frozencore.adapter.export.base_model import BaseLayers, layers_of
from frozencore.adapter.export.stock_peft import targets_for_peft
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.loaded_adapter import LoadedAdapter
from frozencore.adapter.named_layers import last_part
from frozencore.errors import ArtifactError, ConfigError, ModelError
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.names import CONFIG_FILE, WEIGHTS_FILE
from frozencore.files.tokenizer import copy_tokenizer
from frozencore.maths.basis import LayerBasis, known_basis

PACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_SAME_SHAPE = {"k_proj": "v_proj", "v_proj": "k_proj", "gate_proj": "up_proj", "up_proj": "gate_proj"}
_MAYBE_CONV1D = {"c_attn", "c_proj", "c_fc", "q_attn"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that serving engines read."""


@dataclass(frozen=True)
class ExportSource:
    """An adapter to export: of a saved folder, or of a model.

    Attributes:
        layers: P, Q and s by layer name.
        folder: Where it was read from; None for a model's.
    """

    config: FrozenCoreConfig
    core: Core
    layers: Mapping[str, LayerBasis]
    folder: Path | None = None

    @property
    def basis_id(self) -> str:
        """The id of the basis."""
        return self.core.basis_id

    @property
    def ranks(self) -> dict[str, int]:
        """r by layer name, in the order of the core's values."""
        return ranks_of(self.layers)

    @property
    def rank(self) -> int:
        """The largest r of a layer."""
        return max(self.ranks.values())

    @cached_property
    def cores(self) -> dict[str, Tensor]:
        """R by layer name."""
        return self.core.by_layer(self.ranks)


@dataclass(frozen=True)
class LoraExport:
    """The LoRA directory that was written.

    Attributes:
        rank: The one rank of all layers; smaller cores are zero-padded to it.
        layers: The adapted layers.
        zero_layers: Layers with zero factors, because engines pack them with adapted layers.
        fan_in_fan_out: The base has ``Conv1D`` layers (GPT-2), which only PEFT reads.
        compared: PEFT was seen to load it right onto the base model, of which the configuration suffices.
        error: The relative error of a lower rank in Frobenius norm; None without a lower rank.
    """

    directory: Path
    rank: int
    layers: tuple[str, ...]
    zero_layers: tuple[str, ...]
    fan_in_fan_out: bool
    compared: bool
    error: float | None = None


def export_lora(
    model_or_directory: nn.Module | str | Path,
    out: str | Path,
    *,
    adapter_name: str | None = None,
    base: nn.Module | str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    overwrite: bool = False,
) -> LoraExport:
    """Write a frozen-core adapter as a LoRA directory that gives the same outputs without this package.

    Args:
        model_or_directory: A model with a frozen-core adapter, or a folder that ``save_pretrained`` wrote.
        adapter_name: Which adapter of the model; the active one by default.
        base: The base model or its folder; needed only with a folder, for the shapes of layers that engines pack with
            adapted ones. By default the one that the adapter names, if its configuration can be read.
        dtype: The dtype of the factors. Half precision halves the files; bfloat16 costs about 0.2 % of the update.
        rank: A lower rank than the adapter's; the result's ``error`` is the relative error of the cut.
        overwrite: Replace an existing adapter folder.

    Raises:
        ArtifactError: The adapter is damaged or of another base model, or ``out`` exists.
        ConfigError: The rank is below 1, engines do not read the dtype, the adapter does not exist, or trains more than
            its cores. Or PEFT would not load its layers right onto the base model.
        CalibrationError: The adapter has no basis yet.
        ModelError: The given base model cannot be read, or a core is pruned, parametrised or offloaded.
    """
    require_dtype(dtype)
    adapter = export_source(model_or_directory, adapter_name)
    of_base = _base_of(adapter, model_or_directory, base)
    shapes = {name: (len(factors.P), len(factors.Q)) for name, factors in adapter.layers.items()}
    named = layers_to_name(shapes, of_base)
    adapter, rank, error = to_rank(adapter, rank)
    conv1d = of_base is not None and not of_base.conv1d.isdisjoint(adapter.layers)
    with atomic_folder(Path(out), overwrite=overwrite, reads=[adapter.folder, adapter.config.basis]) as aside:
        tensors = _lora_tensors(adapter, named, rank, dtype)
        save_file(tensors, aside / WEIGHTS_FILE, metadata={"format": "pt"})
        config = lora_config(adapter.config, rank, target_modules(named, of_base), fan_in_fan_out=conv1d)
        if of_base is not None:
            config, reason = targets_for_peft(config, tensors, of_base.model)
            if reason is not None:
                raise ConfigError(
                    f"As a LoRA this adapter would be another one: {reason}. Merge it into its model instead "
                    "(frozencore export --to merged), or train without these layers."
                )
        (aside / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        if adapter.folder is not None:
            copy_tokenizer(adapter.folder, aside)
        write_model_card(aside, calibration=num_tokens(adapter.config.calibration_tokens))
    return LoraExport(
        directory=Path(out),
        rank=rank,
        layers=tuple(shapes),
        zero_layers=tuple(name for name in named if name not in shapes),
        fan_in_fan_out=conv1d,
        compared=of_base is not None,
        error=error,
    )


def to_rank(adapter: ExportSource, rank: int | None) -> tuple[ExportSource, int, float | None]:
    """Cut an adapter to at most ``rank`` in each layer.

    Returns:
        The adapter, its rank as a LoRA, and the relative error of the cut.
    """
    if rank is not None and (not isinstance(rank, int) or rank < 1):
        raise ConfigError(f"A LoRA has a rank of at least 1, but {rank!r:.50} was given.")
    if rank is None or rank >= adapter.rank:
        return adapter, adapter.rank, None
    layers, cores, kept, lost = {}, {}, 0.0, 0.0
    for name, basis in adapter.layers.items():
        layers[name], cores[name], S = best_of_rank(basis, adapter.cores[name], rank)
        squares = (S * basis.scale).square()
        kept, lost = kept + float(squares[:rank].sum()), lost + float(squares[rank:].sum())
    cut = replace(adapter, layers=layers, core=Core.of(adapter.basis_id, cores))
    return cut, rank, (lost / (kept + lost)) ** 0.5 if lost else 0.0


def best_of_rank(basis: LayerBasis, R: Tensor, rank: int) -> tuple[LayerBasis, Tensor, Tensor]:
    """The leading singular triples of ``P R Qᵀ`` as P, Q and R (diagonal), in float64, and all singular values."""
    P, Q, R = (X.detach().cpu().double() for X in (basis.P, basis.Q, R))
    left, right = torch.linalg.qr(P), torch.linalg.qr(Q)
    U, S, Vh = torch.linalg.svd(left.R @ R @ right.R.mT)
    return known_basis(left.Q @ U[:, :rank], right.Q @ Vh[:rank].mT, basis.scale), S[:rank].diag(), S


def lora_factors(basis: LayerBasis, R: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A (rank x n) = Qᵀ and B (m x rank) = s·P R in float64, zero-padded to ``rank``."""
    P, Q, R = (X.detach().cpu().double() for X in (basis.P, basis.Q, R))
    missing = rank - R.shape[0]
    return pad(Q.mT, (0, 0, 0, missing)), pad(basis.scale * P @ R, (0, missing))


def _lora_tensors(
    adapter: ExportSource, named: Mapping[str, tuple[int, int]], rank: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, (m, n) in named.items():
        A, B = torch.zeros(rank, n), torch.zeros(m, rank)
        if name in adapter.layers:
            A, B = lora_factors(adapter.layers[name], adapter.cores[name], rank)
        for side, X in (("A", A), ("B", B)):
            key = f"{BASE}{name}.lora_{side}.weight"
            tensors[key] = in_dtype(key, X, dtype)
    return tensors


def lora_config(config: FrozenCoreConfig, rank: int, targets: list[str], *, fan_in_fan_out: bool) -> dict[str, Any]:
    """The configuration of a LoRA, with every field that an engine reads. The scale is in B, so alpha over r is 1."""
    task = getattr(config.task_type, "value", config.task_type)
    return {
        "peft_type": "LORA", "task_type": task, "base_model_name_or_path": config.base_model_name_or_path,
        "revision": config.revision, "auto_mapping": config.auto_mapping, "inference_mode": True,
        "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False,
        "rank_pattern": {}, "alpha_pattern": {}, "target_modules": targets, "fan_in_fan_out": fan_in_fan_out,
        "bias": "none", "modules_to_save": None, "init_lora_weights": True,
    }  # fmt: skip


def layers_to_name(adapted: Mapping[str, tuple[int, int]], base: BaseLayers | None) -> dict[str, tuple[int, int]]:
    """Shapes of the layers that a LoRA directory must name: the adapted ones, and those that engines pack with them.

    SGLang stacks q, k, v (and gate, up) of a layer into one matrix and looks each of them up by name; PEFT builds every
    layer that ``target_modules`` names. A directory with exactly those layers, zero where nothing was adapted,
    satisfies both.
    """
    if base is None:
        return {**adapted, **_inferred(adapted)}
    for name, shape in adapted.items():
        base.require_layer(name, shape)
    kinds = {_kind(name) for layer in adapted for name in (layer, *_siblings(layer))}
    return {**adapted, **{name: shape for name, shape in base.shapes.items() if _kind(name) in kinds}}


def target_modules(named: Iterable[str], base: BaseLayers | None) -> list[str]:
    """Names for ``target_modules`` that match exactly the layers of the directory: last parts of names if possible.

    Modules of any kind count, because PEFT matches them all: ``0`` is the end of ``layers.0`` too.
    """
    layers = set(named)
    last_parts = {last_part(name) for name in layers}
    if base is None:
        return sorted(layers if any(part.isdigit() for part in last_parts) else last_parts)
    if {name for name, _ in base.model.named_modules() if last_part(name) in last_parts} != layers:
        return sorted(layers)
    return sorted(last_parts)


def _inferred(adapted: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Packed layers that are missing: k and v have one shape, gate and up have one shape."""
    unclear = [name for name in adapted if last_part(name) in _MAYBE_CONV1D]
    shapes: dict[str, tuple[int, int]] = {}
    for layer in adapted:
        for name in set(_siblings(layer)) - adapted.keys():
            same_shape = name.removesuffix(last_part(name)) + _SAME_SHAPE.get(last_part(name), "")
            if same_shape in adapted:
                shapes[name] = adapted[same_shape]
            else:
                unclear.append(name)
    if unclear:
        raise ArtifactError(
            f"The shape or kind of layer {unclear[0]!r} is in the base model, not in the adapter: "
            "give base=, the model or its folder (--base on the command line)."
        )
    return shapes


def _siblings(layer: str) -> list[str]:
    last = last_part(layer)
    return [layer.removesuffix(last) + name for pack in PACKS if last in pack for name in pack if name != last]


def _kind(layer: str) -> str:
    """The name without the numbers of layers, so that a vision tower's q_proj is not the text model's."""
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))


def _base_of(
    adapter: ExportSource, origin: nn.Module | str | Path, base: nn.Module | str | Path | None
) -> BaseLayers | None:
    """The layers of the adapter's model, else of ``base``, else of the base that it names, if that can be read."""
    if isinstance(origin, nn.Module):
        base = origin
    if base is not None:
        return layers_of(base)
    if not (named := adapter.config.base_model_name_or_path):
        return None
    with suppress(ModelError):
        return layers_of(named, adapter.config.revision)
    return None


def export_source(model_or_directory: nn.Module | str | Path, adapter_name: str | None = None) -> ExportSource:
    """Read an adapter of a model (by default the active one), or of a saved folder."""
    if isinstance(model_or_directory, nn.Module):
        adapter = LoadedAdapter.of(model_or_directory, adapter_name)
        config = adapter.config
        source = ExportSource(config, adapter.core, adapter.bases)
    else:
        saved = read_adapter(model_or_directory)
        config, basis = saved.config, saved.find_basis()
        source = ExportSource(config, saved.core, basis.layers, saved.folder)
    require_set(source.layers)
    config.require_core_alone("this one", "An exported adapter is a core alone")
    return source


def in_dtype(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert values to another dtype; refuse values that are not finite in it."""
    converted = values.to(dtype).contiguous()
    if not torch.isfinite(converted).all():
        raise ArtifactError(f"{name!r} would be NaN or Inf in {dtype}. Train again, or export in float32.")
    return converted


def require_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype that no engine reads: an integer would round every factor to zero."""
    if dtype not in DTYPES:
        raise ConfigError(f"Serving engines read float32, float16 and bfloat16 factors, but {dtype} was given.")
