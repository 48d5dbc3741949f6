"""LoRAs, and frozen cores on different bases, as one basis and a core for each (:mod:`frozencore.maths.compress`).

    out/basis            P and Q of every layer that an adapter has
    out/NAME/adapter     the core of each adapter, on that basis
    out/compress.json    what each adapter keeps

The files of adapters are mapped into memory. So memory has the cores, and the updates of one layer at a time.

Shapes: m out features, n in features, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from frozencore.adapter.basis import Basis
from frozencore.adapter.card import begin_model_card
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.core import Core
from frozencore.adapter.export.base_model import layers_of
from frozencore.adapter.low_rank_adapter import LowRankAdapter, read_low_rank_adapter, selected
from frozencore.adapter.one_base import mismatched_adapters, name_of_base, other_names, record_of_base
from frozencore.constructors import COMPRESSED
from frozencore.errors import ArtifactError, ConfigError, FrozenCoreError
from frozencore.files.atomic_write import atomic_folder, write_json
from frozencore.files.names import ADAPTER, BASIS, COMPRESSION_FILE, FACTORS_FILE, WEIGHTS_FILE
from frozencore.files.tenant_names import require_tenant_name
from frozencore.files.tokenizer import copy_tokenizer
from frozencore.maths.basis import LayerBasis
from frozencore.maths.compress import (
    CutAlone,
    compress,
    core_of,
    energy,
    sharing_keeps_more_from,
    singular_energies,
)
from frozencore.maths.quantise import default_bits
from frozencore.progress import Progress, no_progress
from frozencore.text import num_of

LEAVE_OUT = "Or leave it out: --skip-bad."
SHOWN = 3  # names and reasons of an error


@dataclass(frozen=True)
class Kept:
    """The share of an adapter's update that its core keeps, ``‖PᵀΔWQ‖² / ‖ΔW‖²``.

    Attributes:
        layers: The share in each layer.
    """

    share: float
    layers: Mapping[str, float]


@dataclass(frozen=True)
class Sizes:
    """Bytes of weights, and whether one basis for all pays.

    Attributes:
        before: All files of the adapters, and the bases that they name.
        after: The basis and all cores.
        basis, tenant, modules: The basis, and on average the file of a core, and what of it are heads and other
            modules that were trained as a whole.
        kept, kept_unrounded: The share of its update that an adapter keeps, on average; without rounding to few bits.
        kept_alone: The same if each adapter is cut alone, to float32 values of as many bytes in all.
        pays_from: The least number of adapters from which one basis pays: it and the cores are then smaller than the
            adapters, and keep at least as much as each adapter cut alone. More adapters are taken to keep the same
            share. None if no number pays.
    """

    before: int
    after: int
    basis: int
    tenant: int
    modules: int
    kept: float
    kept_unrounded: float
    kept_alone: float
    pays_from: int | None


@dataclass(frozen=True)
class CompressedAdapters:
    """The files that were written, and how good they are.

    Attributes:
        rank: The largest rank of a layer.
        bits: Bits of a saved value of the cores.
        kept: By adapter.
        equal: The adapters that are equal to an earlier one but for their scales, which count once, and its name.
        skipped: The reason by adapter.
        other_names: The names that adapters give their base model where the given one has another, or where they
            give it several.
    """

    folder: Path
    basis_id: str
    rank: int
    bits: int
    num_layers: int
    kept: Mapping[str, Kept]
    sizes: Sizes
    equal: Mapping[str, str]
    skipped: Mapping[str, str]
    other_names: list[str]


def compress_adapters(
    adapters: Mapping[str, str | Path],
    out: str | Path,
    *,
    rank: int,
    base: nn.Module | None = None,
    same_base: bool = False,
    skip_bad: bool = False,
    bits: int | None = 32,
    ready: Callable[[Collection[str]], object] = lambda _: None,
    progress: Progress = no_progress,
) -> CompressedAdapters:
    """Compress saved adapters of one base model into one basis and a core for each.

    Args:
        adapters: Folder or hub id of each, by the name of its new folder.
        out: New folder.
        rank: The largest r of a layer; it is smaller where the updates span less, or the layer is narrower.
        base: The base model, to compare layers and weights with, and to record in the basis.
        same_base: The adapters are of one base model, whatever name they give it. With ``base`` names do not count.
        skip_bad: Leave out adapters that cannot be compressed instead of refusing all.
        bits: Bits of a saved value of a core: 32, 8, 4 or 2; None takes those of ``tune`` at the rank that is found.
        ready: Called with the names of the adapters that will be compressed; if it raises, nothing is written.

    Raises:
        ArtifactError: An adapter cannot be read, is of another base model, or changes more than linear layers by
            low-rank products; or ``out`` exists. Nothing is written then.
        ConfigError: The rank is below 1, or a name is no new folder's.
    """
    out = Path(out)
    sources, skipped = _read_sources(adapters, base, same_base, skip_bad, progress)
    shapes = {layer: shape for source in sources.values() for layer, shape in source.shapes.items()}
    if rank < 1:
        raise ConfigError(f"A basis has a rank of 1 or more, but {rank} was given.")
    ready(sources.keys())
    equal = _equal_ones(sources)
    found = _decomposed(sources, shapes, rank, equal, progress)
    config = _config_of(sources, found.bases, base)
    bits = bits or default_bits(config.r)
    scaled = {layer: replace(basis, scale=config.scale_of(layer)) for layer, basis in found.bases.items()}
    record = record_of_base(sources.values(), {layer: shapes[layer] for layer in found.bases}, base)
    shared = config.make_basis(scaled, base=record)
    cores, kept = _rounded(found, config, shared, bits)
    shares = [one.share for one in kept.values()]
    with atomic_folder(out, overwrite=None) as aside:
        made_of = (
            f"the updates of {num_of(len(sources), 'adapter')}, of which it keeps {fmean(shares):.0%} "
            f"({min(shares):.0%} to {max(shares):.0%})"
        )
        replace(shared, calibrated_on=made_of).write(aside / BASIS)
        for name, core in cores.items():
            _write_core(aside, out, name, core, config, sources[name])
        alone = [
            CutAlone(list(by_layer.values()), [sum(shapes[layer]) for layer in by_layer])
            for by_layer in found.spectra.values()
        ]
        unrounded = fmean(_kept(by_layer).share for by_layer in found.energies.values())
        sizes = _sizes_in(aside, sources, alone, found.bases, (fmean(shares), unrounded), bits)
        content = {
            name: {
                "from": source.place, "kept": kept[name].share, "layers": kept[name].layers,
                **({"equal_to": equal[name]} if name in equal else {}),
            }
            for name, source in sources.items()
        }  # fmt: skip
        about = {
            "basis": shared.id, "rank": config.r, "bits": bits, "sizes": asdict(sizes), "adapters": content,
            "skipped": skipped,
        }  # fmt: skip
        write_json(aside / COMPRESSION_FILE, about)
    names = other_names(sources.values(), base)
    return CompressedAdapters(out, shared.id, config.r, bits, len(found.bases), kept, sizes, equal, skipped, names)


@dataclass(frozen=True)
class _Decomposed:
    """The updates of all adapters on the basis of each layer: all but the basis by adapter, then by layer.

    Attributes:
        cores: R in float32; zero where an adapter has no update.
        energies: The energy of the core, and of the update.
        spectra: The squared singular values of the update.
    """

    bases: dict[str, LayerBasis]
    cores: dict[str, dict[str, Tensor]]
    energies: dict[str, dict[str, tuple[float, float]]]
    spectra: dict[str, dict[str, Tensor]]


def _decomposed(
    sources: Mapping[str, LowRankAdapter],
    shapes: Mapping[str, tuple[int, int]],
    rank: int,
    equal: Collection[str],
    progress: Progress,
) -> _Decomposed:
    """Choose the basis of each layer, and put each update on it.

    Args:
        equal: The adapters that do not count, because an earlier one is equal.
    """
    found = _Decomposed(
        {}, {name: {} for name in sources}, {name: {} for name in sources}, {name: {} for name in sources}
    )
    for number, layer in enumerate(shapes, start=1):
        updates = {name: source.update(layer) for name, source in sources.items() if layer in source.factors}
        counted = [name not in equal for name in updates]
        basis = compress(list(updates.values()), min(rank, *shapes[layer]), counted=counted)
        if basis.rank:
            found.bases[layer] = basis
            for name, cores in found.cores.items():
                cores[layer] = torch.zeros(basis.rank, basis.rank)
                if (update := updates.get(name)) is not None:
                    cores[layer] = R = core_of(basis.P, basis.Q, update)
                    found.energies[name][layer] = float(R.double().square().sum()), energy(*update)
                    found.spectra[name][layer] = singular_energies(*update)
        progress("compress", number, len(shapes), layer)
    return found


def _rounded(
    found: _Decomposed, config: FrozenCoreConfig, shared: Basis, bits: int
) -> tuple[dict[str, Core], dict[str, Kept]]:
    """The cores in the bits of a saved value, and what they keep then."""
    cores, kept = dict[str, Core](), dict[str, Kept]()
    for name, of_layers in found.cores.items():
        exact = {layer: R / config.scale_of(layer) for layer, R in of_layers.items()}
        cores[name] = Core.of(shared.id, exact).in_bits(bits, shared.ranks)
        energies = dict(found.energies[name])
        for layer, R in cores[name].by_layer(shared.ranks).items():
            lost = float((R - exact[layer]).double().square().sum()) * config.scale_of(layer) ** 2
            if lost and layer in energies:
                inside, whole = energies[layer]
                energies[layer] = inside - lost, whole
        kept[name] = _kept(energies)
    return cores, kept


def _equal_ones(sources: Mapping[str, LowRankAdapter]) -> dict[str, str]:
    """The adapters that have the factors of an earlier one, and its name."""
    first: dict[str, str] = {}
    return {
        name: earlier for name, source in sources.items() if (earlier := first.setdefault(source.content, name)) != name
    }


def _sizes_in(
    folder: Path,
    sources: Mapping[str, LowRankAdapter],
    alone: Sequence[CutAlone],
    found: Mapping[str, LayerBasis],
    shares: tuple[float, float],
    bits: int,
) -> Sizes:
    """The sizes of the files that were written, and the number of adapters from which a shared basis pays.

    Args:
        shares: The share that is kept, and without rounding.
    """
    kept, unrounded = shares
    files = [folder / name / ADAPTER / WEIGHTS_FILE for name in sources]
    own, number = sum(source.num_bytes for source in sources.values()), len(sources)
    bases = sum(dict(source.named_basis for source in sources.values() if source.named_basis).values())
    basis, tenant = (folder / BASIS / FACTORS_FILE).stat().st_size, sum(f.stat().st_size for f in files) / number
    modules = sum(X.nbytes for source in sources.values() for X in source.modules.values()) / number
    values = sum(one.P.numel() + one.Q.numel() for one in found.values())
    core = sum(one.rank**2 for one in found.values()) * bits / 32  # cut alone an adapter keeps float32
    saved = own / number - tenant
    smaller_from = max(int((basis - bases) // saved) + 1, 1) if saved > 0 else None
    better_from = sharing_keeps_more_from(alone, kept, values, core)
    return Sizes(
        own + bases, round(basis + number * tenant), basis, round(tenant), round(modules), kept, unrounded,
        sum(one.kept(values / number + core) for one in alone) / len(alone),
        None if smaller_from is None or better_from is None else max(smaller_from, better_from),
    )  # fmt: skip


def _read_sources(
    adapters: Mapping[str, str | Path], base: nn.Module | None, same_base: bool, skip_bad: bool, progress: Progress
) -> tuple[dict[str, LowRankAdapter], dict[str, str]]:
    """The adapters that can be compressed together, and the reasons why the others cannot."""
    sources: dict[str, LowRankAdapter] = {}
    refused: dict[str, FrozenCoreError] = {}
    bases: dict[str, Basis] = {}
    for number, (name, place) in enumerate(adapters.items(), start=1):
        try:
            require_tenant_name(name, str(place))
            sources[name] = read_low_rank_adapter(str(place), bases)
        except FrozenCoreError as error:
            refused[name] = error
        progress("read", number, len(adapters), name)
    for name, reason in mismatched_adapters(sources, base, same_base=same_base).items():
        what = f"Adapters on one basis are of one base model, but {sources.pop(name).place} {reason}."
        refused[name] = ArtifactError(what)
    if refused and not skip_bad:
        (_, first), *others = refused.items()
        also = (
            f"Nor can {num_of(len(others), 'other')} be compressed: {', '.join(n for n, _ in others[:SHOWN])}. "
            if others
            else ""
        )
        raise type(first)(f"{first} {also}{LEAVE_OUT}") from first
    skipped = {name: str(error) for name, error in refused.items()}
    if not sources:
        reasons = " ".join([*skipped.values()][:SHOWN]) or "Name one."
        raise ArtifactError(f"There is no adapter to compress. {reasons}")
    return sources, skipped


def _config_of(
    sources: Mapping[str, LowRankAdapter], layers: Mapping[str, LayerBasis], base: nn.Module | None
) -> FrozenCoreConfig:
    """The configuration of the basis; it has short names of layers if these select no other layer of the base model."""
    targets = [source.targets for source in sources.values()]
    named, others = frozenset(layers), frozenset[str]()
    if base is not None:
        of_base = layers_of(base).shapes.keys()
        short = frozenset[str]().union(*(names or () for names in targets))
        if None not in targets and selected(of_base, short) == layers.keys():
            named = short
        others = selected(of_base, named) - layers.keys()  # a full name may be the end of another
    ranks = {layer: basis.rank for layer, basis in layers.items()}
    name, revision = name_of_base(sources.values(), base)
    return FrozenCoreConfig(
        r=max(ranks.values()), rank_pattern=ranks if len({*ranks.values()}) > 1 else {}, target_modules=sorted(named),
        exclude_modules=sorted(others) or None, constructor=COMPRESSED,
        base_model_name_or_path=name, revision=revision,
    )  # fmt: skip


def _kept(energies: Mapping[str, tuple[float, float]]) -> Kept:
    """Shares of energies; a layer without an update keeps all of it."""

    def share(kept: float, whole: float) -> float:
        return min(1.0, max(0.0, kept) / whole) if whole > 0 else 1.0

    total = [sum(energy[side] for energy in energies.values()) for side in (0, 1)]
    return Kept(share(*total), {layer: share(*energy) for layer, energy in energies.items()})


def _write_core(aside: Path, out: Path, name: str, core: Core, basis: FrozenCoreConfig, source: LowRankAdapter) -> None:
    """Write an adapter of a core on the basis beside it, and of the modules that its source trained as a whole.

    These may be embeddings of tokens that the base model lacks, so the source's tokenizer goes with them. A core alone
    is kilobytes and has none.
    """
    config = FrozenCoreConfig(
        basis=str(aside / BASIS), base_model_name_or_path=basis.base_model_name_or_path,
        revision=basis.revision, task_type=source.task_type, modules_to_save=source.modules_to_save,
        ensure_weight_tying=source.ties_weights, inference_mode=True,
    )  # fmt: skip
    config.basis, folder = str(out / BASIS), aside / name / ADAPTER  # where the basis will be
    begin_model_card(folder)
    save_file({**core.tensors, **source.modules}, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config.save_pretrained(folder)
    if source.modules:
        copy_tokenizer(source.folder, folder)
