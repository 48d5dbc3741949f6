"""Saved adapters whose whole update is low-rank products: LoRAs of PEFT, and frozen cores.

Patterns, rsLoRA and names of layers are read as PEFT reads them, so an update is the one that PEFT computes.

Shapes: m out features, n in features, k rank of an update.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType
from peft.utils.other import get_pattern_key
from torch import Tensor

from frozencore.adapter.basis import Basis
from frozencore.adapter.core import BASE
from frozencore.adapter.folders import read_adapter, read_tensors, weights_file
from frozencore.adapter.named_layers import is_among
from frozencore.adapter.state_dict import HEADS
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import PEFT_TYPE, find_adapter, read_config
from frozencore.files.fingerprint import fingerprint_tensors
from frozencore.maths.compress import Update
from frozencore.maths.linalg import all_finite
from frozencore.text import one_line

MERGE, SAVE = "Merge it into the base model", "Save it again"
UNCALIBRATED = "was never calibrated", "Train it"
MORE_THAN_PRODUCTS: Mapping[str, str] = {
    "target_parameters": "adapts stacked parameters, as those of experts",
    "trainable_token_indices": "trains embeddings of tokens",
    "use_dora": "scales the rows of the weights (DoRA)",
    "lora_bias": "trains biases",
    "layer_replication": "repeats layers",
    "use_qalora": "averages the inputs of its layers",
    "use_bdlora": "has factors of several blocks",
    "arrow_config": "chooses among several adapters",
    "kasa_config": "changes the base weights",
    "alora_invocation_tokens": "works after certain tokens alone",
}
"""Options of ``LoraConfig`` with which an update is more than B A, and what they do."""
PLAIN_STARTS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Texts of ``init_lora_weights`` that leave the base weights as they are."""
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that torch.compile, activation checkpointing and FSDP put into the name of a layer."""
COPY = ".base_layer.weight"
SIDES = {".lora_A.weight": "A", ".lora_B.weight": "B"}


@dataclass(frozen=True)
class LowRankAdapter:
    """An adapter to compress.

    Attributes:
        place: The folder or hub id, for errors; ``folder`` is where its files are.
        base_model: The name of its base model, if it has one; so is ``revision``.
        base: The record of the base model's weights, if there is one.
        factors: The scale of each layer, and the matrices whose product is its update: B A, or P R Qᵀ. Those of a file
            are mapped, and read when they are used; adapters on a named basis share its P and Q.
        targets: The names in ``target_modules``; None if a layer is named by none of them.
        num_bytes: The size of its file of weights.
        named_basis: The id of the basis that it names, and the bytes of its P and Q; None if they are in its file.
        modules_to_save, modules: The names of the modules that were trained as a whole, as a classifier's head, and
            their tensors by their names in the file; ``ties_weights`` is PEFT's ``ensure_weight_tying``.
        copies: Weights of the base model by layer. PEFT saves the weight of an adapted head.
    """

    place: str
    folder: Path
    base_model: str | None
    revision: str | None
    task_type: str | None
    base: Mapping[str, str] | None
    factors: Mapping[str, tuple[float, tuple[Tensor, ...]]]
    targets: frozenset[str] | None
    num_bytes: int
    modules_to_save: list[str] | None
    modules: Mapping[str, Tensor]
    ties_weights: bool = False
    copies: Mapping[str, Tensor] = field(default_factory=dict)
    named_basis: tuple[str, int] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(m, n) by layer."""
        return {layer: (factors[0].shape[0], factors[-1].shape[1]) for layer, (_, factors) in self.factors.items()}

    @property
    def content(self) -> str:
        """The hash of its factors without their scales; adapters with one content differ by a factor in each layer."""
        scaled = sorted((layer, factors) for layer, (scale, factors) in self.factors.items() if scale)
        return fingerprint_tensors((f"{layer}.{i}", X) for layer, factors in scaled for i, X in enumerate(factors))

    def update(self, layer: str) -> Update:
        """B (m x k, with the scale) and A (k x n) of a layer, in float32."""
        scale, (first, *others, last) = self.factors[layer]
        B = scale * first.float()
        for X in others:
            B = B @ X.float()
        return B, last.float()


def read_low_rank_adapter(place: str, bases: dict[str, Basis]) -> LowRankAdapter:
    """Check an adapter, and read all but its factors.

    Args:
        bases: Bases by id; one that is not there is added.

    Raises:
        ArtifactError: It is no adapter, is damaged, or changes more than linear layers by low-rank products.
    """
    folder = find_adapter(place, with_tokenizer=True)
    config = read_config(folder)
    is_core = config.get("peft_type") == PEFT_TYPE
    source = _read_core(place, folder, bases) if is_core else _read_lora(place, folder, config)
    if not any(scale and all(bool(X.any()) for X in factors) for scale, factors in source.factors.values()):
        _refuse(place, [("is untrained: every product is zero", "Train it")])
    for layer, (scale, factors) in source.factors.items():
        sizes = [scale**2 if scale else 1.0, *(float(X.float().square().sum()) for X in factors)]
        if not all(map(isfinite, sizes)) or (not all(sizes) and all(bool(X.any()) for X in factors)):
            _refuse(place, [(f"has values of a size that float32 cannot square in {layer!r}", SAVE)])
    return source


def _read_core(place: str, folder: Path, bases: dict[str, Basis]) -> LowRankAdapter:
    saved = read_adapter(folder)
    config, basis = saved.config, bases.get(saved.core.basis_id) or saved.find_basis()
    bases[basis.id] = basis
    tokens = [("trains embeddings of tokens (trainable_token_indices)", MERGE)]
    _refuse(place, [*(tokens if config.trainable_token_indices else ()), *(() if basis.is_set else [UNCALIBRATED])])
    partial = config.layers_to_transform is not None or config.exclude_modules or 0 in config.rank_pattern.values()
    cores = saved.core.by_layer(basis.ranks)
    return LowRankAdapter(
        place, folder, config.base_model_name_or_path, config.revision,
        getattr(config.task_type, "value", config.task_type), basis.base,
        factors={name: (layer.scale, (layer.P, cores[name], layer.Q.mT)) for name, layer in basis.layers.items()},
        targets=None if partial else _targets(config.target_modules, basis.layers),
        num_bytes=weights_file(folder).stat().st_size,
        modules_to_save=config.modules_to_save, modules=saved.modules, ties_weights=config.ensure_weight_tying,
        named_basis=None if saved.basis is not None else
        (basis.id, sum(layer.num_bytes for layer in basis.layers.values())),
    )  # fmt: skip


def _read_lora(place: str, folder: Path, config: Mapping[str, Any]) -> LowRankAdapter:
    _refuse(place, _odd_options(config))
    if unknown := sorted(name for name in config if config[name] and name not in LoraConfig.__dataclass_fields__):
        warnings.warn(
            f"An adapter has options that this version of PEFT does not know, and that are ignored, as PEFT ignores "
            f"them: {one_line(', '.join(unknown), 200)}. If one of them changes the update, its core is wrong.",
            stacklevel=2,
        )
    tensors = read_tensors(folder)
    _refuse(place, _odd_tensors(tensors))
    modules_to_save = [*dict.fromkeys([*(config.get("modules_to_save") or []), *_heads(config, tensors)])]
    pairs, modules, copies = _split(place, tensors, modules_to_save)
    factors = {}
    for layer, (B, A) in pairs.items():
        rank, alpha = _rank_and_alpha(place, config, layer)
        _refuse(place, _odd_scale(layer, A, rank, alpha))
        factors[layer] = alpha / (rank**0.5 if config.get("use_rslora") else rank), (B, A)
    partial = any(config.get(name) for name in ("exclude_modules", "layers_pattern"))
    partial = partial or config.get("layers_to_transform") is not None
    return LowRankAdapter(
        place, folder, config.get("base_model_name_or_path"), config.get("revision"), config.get("task_type"),
        base=None, factors=factors, targets=None if partial else _targets(config.get("target_modules"), factors),
        num_bytes=weights_file(folder).stat().st_size, modules_to_save=modules_to_save or None, modules=modules,
        ties_weights=bool(config.get("ensure_weight_tying")), copies=copies,
    )  # fmt: skip


Reasons = Iterable[tuple[str, str]]
"""The parts of an adapter that are no low-rank products, each with the way out."""


def _odd_options(config: Mapping[str, Any]) -> Reasons:
    """Options with which the update is more than B A of each layer."""
    if (kind := config.get("peft_type")) != "LORA":
        yield f"is of PEFT's type {kind!r:.40}" if kind else "has no peft_type: it is not PEFT's", MERGE
    for name, values in (("task_type", [*TaskType]), ("base_model_name_or_path", None), ("revision", None)):
        value = config.get(name)
        if value is not None and (not isinstance(value, str) or (values is not None and value not in values)):
            yield f"has a malformed {name} ({value!r:.40})", SAVE
    modules = config.get("modules_to_save") or []
    if not isinstance(modules, list) or not all(isinstance(one, str) for one in modules):
        yield f"has a malformed modules_to_save ({modules!r:.40})", SAVE
    if option := next((name for name in MORE_THAN_PRODUCTS if config.get(name)), None):
        yield f"{MORE_THAN_PRODUCTS[option]} ({option})", MERGE
    if (bias := config.get("bias")) not in (None, "none"):
        yield f"trains biases (bias={bias!r:.40})", MERGE
    if changes_base(config) and not config.get("kasa_config"):
        what = f"began with changed base weights (init_lora_weights={config['init_lora_weights']!r:.40})"
        yield what, "Save it with PEFT's path_initial_model_for_weight_conversion"


def changes_base(config: Mapping[str, Any]) -> bool:
    """Return whether PEFT changes the weights of the base model when it loads an adapter (PiSSA, OLoRA and others)."""
    start = config.get("init_lora_weights")
    return bool(config.get("kasa_config")) or (isinstance(start, str) and start.lower() not in PLAIN_STARTS)


def _odd_tensors(tensors: Mapping[str, Tensor]) -> Reasons:
    """Tensors of a file that are no values of a trained LoRA."""
    if odd := next((key for key, X in tensors.items() if X.is_floating_point() and not all_finite(X.float())), None):
        yield f"has NaN or Inf in {odd!r:.200}", "Train it again"
    if not tensors or any(X.numel() == 0 for X in tensors.values()):
        what = "has no values in its file, as DeepSpeed ZeRO-3 leaves it if weights are not gathered"
        yield what, "Save it again, with stage3_gather_16bit_weights_on_model_save"
    if embedding := next((key for key in tensors if ".lora_embedding_" in key), None):
        yield f"adapts an embedding, as {embedding!r:.200}", MERGE


def _heads(config: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """The heads of the task that are in the file, without those that have factors of their own."""
    heads = HEADS.get(str(config.get("task_type")), ())
    names = {head: [key for key in tensors if f".{head}." in key] for head in heads}
    return [head for head, keys in names.items() if keys and not any(".lora_" in key for key in keys)]


def _odd_scale(layer: str, A: Tensor, rank: Any, alpha: Any) -> Reasons:
    """A rank or alpha with which the scale of a layer is unknown."""
    if rank != len(A):
        yield f"has rank {len(A)} in {layer!r} where its configuration has {rank!r:.40}", SAVE
    if not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
        yield f"gives {layer!r} the alpha {alpha!r:.40}", SAVE


def _odd_factors(sides: Mapping[str, Mapping[str, Tensor]]) -> Reasons:
    """Layers without two matrices of one rank in floating point."""
    for layer, by_side in sides.items():
        matrices = by_side.keys() == {"A", "B"} and all(X.ndim == 2 for X in by_side.values())
        if not matrices or by_side["A"].shape[0] != by_side["B"].shape[1]:
            shapes = " and ".join(f"{side} {tuple(X.shape)}" for side, X in sorted(by_side.items()))
            yield f"has no two matrices of one rank in {layer!r}, but {shapes}", MERGE
        if not all(X.is_floating_point() for X in by_side.values()):
            yield f"has factors of {layer!r} in {next(iter(by_side.values())).dtype}", "Save it in float32"


def _split(
    place: str, tensors: Mapping[str, Tensor], modules_to_save: Collection[str]
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """B (m x k) and A (k x n) by layer; the tensors of the modules that were trained as a whole; copied weights."""
    sides: dict[str, dict[str, Tensor]] = {}
    modules: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for key, X in tensors.items():
        name = without_wrappers(key)
        ending = next((ending for ending in SIDES if name.startswith(BASE) and name.endswith(ending)), None)
        if ending is not None:
            sides.setdefault(name.removeprefix(BASE).removesuffix(ending), {})[SIDES[ending]] = X
        elif any(f"{module}." in name for module in modules_to_save):  # PEFT takes every module whose name ends so
            modules[name] = X
        else:
            others[name] = X
    copies = {layer: others.pop(key) for layer in sides if (key := f"{BASE}{layer}{COPY}") in others}
    # a tied weight is saved twice
    odd = (name for name, X in others.items() if not any(torch.equal(X, module) for module in modules.values()))
    more = "has more than factors of linear layers and what modules_to_save names, as"
    _refuse(place, ((f"{more} {name!r:.200}", MERGE) for name in odd))
    _refuse(place, _odd_factors(sides))
    return {layer: (by_side["B"], by_side["A"]) for layer, by_side in sides.items()}, modules | others, copies


def _rank_and_alpha(place: str, config: Mapping[str, Any], layer: str) -> tuple[Any, Any]:
    """The rank and alpha of a layer, as PEFT finds them: by the first key of a pattern that matches its name."""
    values = []
    for option, name in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        pattern = config.get(name) or {}
        try:
            values.append(pattern.get(get_pattern_key(list(pattern), layer), config.get(option, 8)))
        except (re.error, AttributeError, TypeError) as error:
            _refuse(place, [(f"has a malformed {name} ({one_line(error, 80)})", SAVE)])
    return values[0], values[1]


def without_wrappers(name: str) -> str:
    """The name of a layer or tensor without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _targets(named: Any, layers: Mapping[str, Any]) -> frozenset[str] | None:
    """The names in ``target_modules`` if each layer is named by one of them; None otherwise."""
    names = frozenset(named) if isinstance(named, list | set) else frozenset[str]()
    return names if selected(layers, names) == layers.keys() else None


def selected(layers: Iterable[str], names: Collection[str]) -> frozenset[str]:
    """The layers that PEFT finds by these names."""
    return frozenset(layer for layer in layers if is_among(layer, names))


def _refuse(place: str, reasons: Reasons) -> None:
    """Raise the first reason, if there is one."""
    for what, remedy in reasons:
        raise ArtifactError(f"An adapter to compress is low-rank products alone, but {place} {what}. {remedy}.")
