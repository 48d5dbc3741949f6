"""LoRAs, and frozen cores on bases of their own, as one basis and a core for each (:mod:`frozencore.maths.compress`).

    out/basis            P and Q of every layer that an adapter has
    out/NAME/adapter     the core of each adapter, on that basis
    out/compress.json    what each adapter keeps

The files of adapters are mapped into memory, so the updates of one layer of all adapters are in it, with all cores.

Shapes: m out features, n in features, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.export.base_model import layers_of
from frozencore.adapter.export.serving import RULES, LoraDirectory, read_lora_directory
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.named_layers import refuse_expressions
from frozencore.adapter.one_base import names_of_base, other_bases, record_of_base
from frozencore.adapter.saved.basis import SavedBasis, ScaledBasis
from frozencore.adapter.saved.card import begin_model_card
from frozencore.adapter.saved.tensors import BASE, cores_key, flatten_cores, hash_tensors, layer_factors
from frozencore.constructors import COMPRESSED
from frozencore.errors import ArtifactError, ConfigError, FrozenCoreError
from frozencore.files.adapter_folder import (
    BASIS_FOLDER,
    COMPRESSION_FILE,
    IN_A_RUN,
    PEFT_TYPE,
    WEIGHTS_FILE,
    adapter_in,
    folder_of,
    read_config,
    require_tenant_name,
)
from frozencore.files.atomic_write import atomic_folder, write_json
from frozencore.maths.compress import Update, compress
from frozencore.text import Progress, num_of

UNREADABLE = frozenset(
    {"is_lora", "rank_is_positive", "alpha_is_a_number", "no_dora", "no_bias", "no_whole_modules", "plain_start",
     "no_variant", "no_activation", "no_tenant", "some_factors", "only_factors", "factors_in_pairs", "factors_fit",
     "ranks_are_r", "all_finite"}
)  # fmt: skip
"""The rules of :mod:`frozencore.adapter.export.serving` without which factors are not the whole update."""
OTHER_PARTS = ("trainable_token_indices", "target_parameters")
PLAIN = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LowRankAdapter:
    """An adapter to compress.

    Attributes:
        place: The folder or hub id, for errors.
        base_model: The name of its base model, if it has one; so is ``revision``.
        base: The record of the base model's weights, if there is one.
        factors: The scale of each layer, and the matrices whose product is its update: B A, or P R Qᵀ. Those of a file
            are mapped, and read when they are used; adapters on a named basis share its P and Q.
        targets: Names of which each layer has one; None if only its full name will do.
    """

    place: str
    base_model: str | None
    revision: str | None
    task_type: str | None
    base: dict[str, str] | None
    factors: Mapping[str, tuple[float, tuple[Tensor, ...]]]
    targets: frozenset[str] | None

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(m, n) by layer."""
        return {layer: (own[0].shape[0], own[-1].shape[1]) for layer, (_, own) in self.factors.items()}

    def update(self, layer: str) -> Update:
        """B (m x k, with the scale) and A (k x n) of a layer, in float32."""
        scale, (first, *others, last) = self.factors[layer]
        B = scale * first.float()
        for X in others:
            B = B @ X.float()
        return B, last.float()


def read_source(place: str, bases: dict[str, SavedBasis]) -> LowRankAdapter:
    """Check an adapter, and read all but its factors.

    Args:
        bases: Bases by identity; a named basis that is not there is added.

    Raises:
        ArtifactError: It is no adapter, is damaged, or changes more than linear layers by low-rank products.
    """
    folder = adapter_in(folder_of(place))
    if read_config(folder).get("peft_type") == PEFT_TYPE:
        source = _read_core(place, folder, bases)
    else:
        source = _read_lora(place, read_lora_directory(folder), folder)
    if not any(scale and all(bool(X.any()) for X in own) for scale, own in source.factors.values()):
        raise _unreadable(place, "every product is zero, as before training", "train it")
    return source


def _read_core(place: str, folder: Path, bases: dict[str, SavedBasis]) -> LowRankAdapter:
    config, factors = read_adapter(folder)
    if config.trains_modules:
        raise _unreadable(place, "modules besides its cores were trained", "merge it into the base model")
    if not any(bool(f.P.any()) for f in factors.values()):
        raise _unreadable(place, "it was never calibrated", "train it")
    if config.basis_id is None:
        held = layer_factors(place, load_file(folder / WEIGHTS_FILE))
    else:
        if config.basis_id not in bases:
            bases[config.basis_id] = config.find_basis(str(folder))
        held = {name: (*bases[config.basis_id].layers[name][:2], own.R) for name, own in factors.items()}
    partial = config.layers_to_transform is not None or config.exclude_modules or 0 in config.rank_pattern.values()
    return LowRankAdapter(
        place, config.base_model_name_or_path, config.revision, _task_of(config.task_type), config.base_record,
        factors={name: (factors[name].scale, (P, R, Q.mT)) for name, (P, Q, R) in held.items()},
        targets=None if partial else _targets(config.target_modules, factors),
    )  # fmt: skip


def _read_lora(place: str, lora: LoraDirectory, folder: Path) -> LowRankAdapter:
    config = lora.config
    for rule in RULES:
        if rule.name in UNREADABLE and (found := rule.broken(lora)) is not None:
            raise _unreadable(place, found, rule.remedy)
    if part := next((name for name in OTHER_PARTS if config.get(name)), None):
        raise _unreadable(place, f"{part} is set", "merge it into the base model")
    for key, facts in lora.tensors.items():
        if ".lora_embedding_" in key:
            raise _unreadable(place, f"{key!r} adapts an embedding", "merge it into the base model")
        if facts.dtype not in PLAIN:
            raise _unreadable(place, f"{key!r} is {facts.dtype}", "save it in float32")
    patterns = {name: lora.mapping(name) for name in ("rank_pattern", "alpha_pattern")}
    refuse_expressions(place, patterns, "Write the layers' full names in its place.")
    held, factors = load_file(folder / WEIGHTS_FILE), {}
    for layer, A, _ in lora.pairs:
        rank, alpha = (
            pattern.get(get_pattern_key(list(pattern), layer), config[option])
            for option, pattern in zip(("r", "lora_alpha"), patterns.values(), strict=True)
        )
        if rank != A[0]:
            raise _unreadable(place, f"{layer!r} has rank {A[0]} and the configuration {rank}", "save it again")
        alphas = patterns["alpha_pattern"].items()
        if len({str(own) for key, own in alphas if get_pattern_key([key], layer) == key}) > 1:
            found = f"alpha_pattern gives {layer!r} two alphas, and a file does not keep the order that decides"
            raise _unreadable(place, found, "write the layers' full names alone")
        if not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
            raise _unreadable(place, f"alpha_pattern gives {layer!r} {alpha!r:.40}", "save it again")
        B_and_A = tuple(held[f"{BASE}{layer}.lora_{side}.weight"] for side in "BA")
        factors[layer] = alpha / (rank**0.5 if config.get("use_rslora") else rank), B_and_A
    partial = any(config.get(name) for name in ("exclude_modules", "layers_pattern"))
    partial = partial or config.get("layers_to_transform") is not None
    return LowRankAdapter(
        place, config.get("base_model_name_or_path"), config.get("revision"), _task_of(config.get("task_type")),
        base=None, factors=factors,
        targets=None if partial else _targets(config.get("target_modules"), factors),
    )  # fmt: skip


def _unreadable(place: str, found: str, remedy: str) -> ArtifactError:
    return ArtifactError(
        f"The whole update of an adapter must be low-rank products, but of {place} {found}: leave it out (--skip-bad), "
        f"or {remedy}."
    )


def _task_of(task: Any) -> str | None:
    return getattr(task, "value", task)


def _targets(named: Any, layers: Mapping[str, Any]) -> frozenset[str] | None:
    """The names in ``target_modules`` if each layer is named by one of them; None otherwise."""
    names = frozenset(named) if isinstance(named, list | set) else frozenset[str]()
    return names if _selected(layers, names) == layers.keys() else None


@dataclass(frozen=True)
class Kept:
    """The share of an adapter's update that its core keeps, ``‖PᵀΔWQ‖² / ‖ΔW‖²``.

    Attributes:
        layers: The share in each layer.
    """

    share: float
    layers: Mapping[str, float]


@dataclass(frozen=True)
class CompressedAdapters:
    """What was written.

    Attributes:
        kept: By adapter.
        skipped: The reason by adapter.
        other_name: The name that most adapters give their base model, if the given one has another.
    """

    folder: Path
    identity: str
    rank: int
    num_layers: int
    kept: Mapping[str, Kept]
    skipped: Mapping[str, str]
    other_name: str | None


def compress_adapters(
    adapters: Mapping[str, str | Path],
    out: str | Path,
    *,
    rank: int,
    base: nn.Module | None = None,
    skip_bad: bool = False,
    ready: Callable[[Collection[str]], object] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> CompressedAdapters:
    """Compress saved adapters of one base model into one basis and a core for each.

    Args:
        adapters: Folder or hub id of each, by the name of its new folder.
        out: New folder.
        rank: r of the basis.
        base: The base model, to compare layers and weights with, and to record in the basis.
        skip_bad: Leave out adapters that cannot be compressed instead of refusing all.
        ready: Called with the names of those that will be compressed; if it raises, nothing is written.

    Raises:
        ArtifactError: An adapter cannot be read, is of another base model, or changes more than linear layers by
            low-rank products; or ``out`` exists. Nothing is written then.
        ConfigError: The rank is larger than a layer, a name is no new folder's, or the base model has adapters.
    """
    out = Path(out)
    if base is not None and any(isinstance(module, BaseTunerLayer) for module in base.modules()):
        raise ConfigError("The base model has no adapters, but one with an adapter came. Load the plain model.")
    sources, skipped = _read_sources(adapters, base, skip_bad, progress)
    shapes = {layer: shape for source in sources.values() for layer, shape in source.shapes.items()}
    for layer, shape in shapes.items():
        if not 1 <= rank <= min(shape):
            raise ConfigError(
                f"A basis has a rank from 1 to the width of its narrowest layer, but {rank} came and {layer!r} is "
                f"{shape[0]} x {shape[1]}. Give --rank {min(min(each) for each in shapes.values())} or less."
            )
    ready(sources.keys())
    name_of_base, other_name = names_of_base(sources.values(), base)
    config = _config_of(sources, rank, shapes, base, name_of_base)
    bases: dict[str, ScaledBasis] = {}
    cores: dict[str, dict[str, Tensor]] = {name: {} for name in sources}
    energies: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in sources}
    for number, layer in enumerate(shapes, start=1):
        have = [name for name, source in sources.items() if layer in source.factors]
        found = compress([sources[name].update(layer) for name in have], rank)
        bases[layer] = ScaledBasis(found.P, found.Q, config.scale_of(layer))
        for name in sources:
            cores[name][layer] = torch.zeros(rank, rank)
        for name, R, *energy in zip(have, found.cores, found.kept_energies, found.energies, strict=True):
            cores[name][layer] = R / config.scale_of(layer)
            energies[name][layer] = (energy[0], energy[1])
        progress("compress", number, len(shapes), layer)
    record = record_of_base(sources.values(), shapes, base)
    kept = {name: _kept(own) for name, own in energies.items()}
    with atomic_folder(out, overwrite=None) as aside:
        shares = [one.share for one in kept.values()]
        made_of = (
            f"the updates of {num_of(len(sources), 'adapter')}, of which it keeps {sum(shares) / len(shares):.0%} "
            f"({min(shares):.0%} to {max(shares):.0%})"
        )
        identity = config.saved_basis(bases, base=record, calibrated_on=made_of).write(aside / BASIS_FOLDER)
        for name, own in cores.items():
            _write_core(aside, out, name, own, config)
        content = {
            name: {"from": source.place, "kept": kept[name].share, "layers": kept[name].layers}
            for name, source in sources.items()
        }
        write_json(aside / COMPRESSION_FILE, {"basis": identity, "rank": rank, "adapters": content, "skipped": skipped})
    return CompressedAdapters(out, identity, rank, len(shapes), kept, skipped, other_name)


def _read_sources(
    adapters: Mapping[str, str | Path], base: nn.Module | None, skip_bad: bool, progress: Progress
) -> tuple[dict[str, LowRankAdapter], dict[str, str]]:
    """The adapters that can be compressed together, and why others cannot."""
    sources: dict[str, LowRankAdapter] = {}
    skipped: dict[str, str] = {}
    bases: dict[str, SavedBasis] = {}
    for number, (name, place) in enumerate(adapters.items(), start=1):
        try:
            require_tenant_name(name, str(place))
            sources[name] = read_source(str(place), bases)
        except FrozenCoreError as error:
            if not skip_bad:
                raise
            skipped[name] = str(error)
        progress("read", number, len(adapters), name)
    for name, reason in other_bases(sources, base).items():
        place = sources.pop(name).place
        skipped[name] = f"One base model has all adapters, but of {place} {reason}: leave it out (--skip-bad)."
        if not skip_bad:
            raise ArtifactError(skipped[name])
    if not sources:
        raise ArtifactError(f"There is no adapter to compress. {next(iter(skipped.values()), 'Name one.')}")
    return sources, skipped


def _selected(layers: Iterable[str], names: Collection[str]) -> frozenset[str]:
    """The layers that PEFT finds by these names."""
    return frozenset(layer for layer in layers if any(f".{layer}".endswith(f".{name}") for name in names))


def _config_of(
    sources: Mapping[str, LowRankAdapter],
    rank: int,
    layers: Mapping[str, Any],
    base: nn.Module | None,
    name: str | None,
) -> FrozenCoreConfig:
    """The configuration of the basis: its layers by short names if, in the base model, these select no others."""
    tasks = {source.task_type for source in sources.values()}
    targets = [source.targets for source in sources.values()]
    named, others = frozenset(layers), frozenset[str]()
    if base is not None:
        of_base = layers_of(base).shapes.keys()
        short = frozenset[str]().union(*(own or () for own in targets))
        if None not in targets and _selected(of_base, short) == layers.keys():
            named = short
        others = _selected(of_base, named) - layers.keys()  # a full name may be the end of another
    return FrozenCoreConfig(
        r=rank, target_modules=sorted(named), exclude_modules=sorted(others) or None, constructor=COMPRESSED,
        base_model_name_or_path=name, task_type=tasks.pop() if len(tasks) == 1 else None,
    )  # fmt: skip


def _kept(energies: Mapping[str, tuple[float, float]]) -> Kept:
    """Shares of energies; a layer without an update keeps all of it."""
    shares = {layer: min(1.0, kept / whole) if whole > 0 else 1.0 for layer, (kept, whole) in energies.items()}
    kept, whole = (sum(own[side] for own in energies.values()) for side in (0, 1))
    return Kept(min(1.0, kept / whole) if whole > 0 else 1.0, shares)


def _write_core(aside: Path, out: Path, name: str, cores: Mapping[str, Tensor], basis: FrozenCoreConfig) -> None:
    """Write an adapter of cores alone on the basis beside it."""
    config = FrozenCoreConfig(
        basis=str(aside / BASIS_FOLDER), base_model_name_or_path=basis.base_model_name_or_path,
        task_type=basis.task_type, inference_mode=True,
    )  # fmt: skip
    assert config.basis_id is not None
    config.basis = str(out / BASIS_FOLDER)  # where it will be
    tensors, folder = {cores_key(config.basis_id): flatten_cores(cores)}, aside / name / IN_A_RUN
    begin_model_card(folder)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config.tensors_sha256 = hash_tensors(tensors)
    config.save_pretrained(folder)
