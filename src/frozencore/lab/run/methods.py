"""Methods on a model: the nine frozen-core constructors, LoRA, DoRA and PiSSA, by one name each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import layer_shape
from frozencore.adapter.model import FrozenCoreModel, frozen_core_layers
from frozencore.calibration.options import as_hashed
from frozencore.errors import ConfigError
from frozencore.fingerprint import fingerprint_tensors
from frozencore.lab.run.baselines import add_baseline, save_baseline
from frozencore.lab.run.config import RunConfig, Targets
from frozencore.maths.moments import MomentName
from frozencore.whole_file import whole_folder


def add_method(config: RunConfig, model: nn.Module, targets: Targets) -> PeftModel:
    """The configured adapter on a base model, not yet calibrated."""
    if config.is_baseline:
        return add_baseline(model, config.method, rank=config.rank, target_modules=targets, seed=config.seed)
    return get_peft_model(model, core_config(config, targets))


def core_config(config: RunConfig, targets: Targets, *, load_bases: bool = False) -> FrozenCoreConfig:
    """The frozen-core adapter that a run's configuration describes.

    Args:
        load_bases: Its bases are about to be given to it, so none is built.
    """
    return FrozenCoreConfig(
        r=config.rank,
        target_modules=targets if isinstance(targets, str) else list(targets),
        constructor=config.method,
        seed=config.seed,
        task_type="CAUSAL_LM",
        load_bases=load_bases,
        **config.core.model_dump(),
    )


def options_of_method(config: RunConfig, targets: Targets) -> dict[str, Any]:
    """What an adapter is chosen and built by, beside the data: JSON values by name."""
    return {
        "method": config.method,
        "rank": config.rank,
        "targets": targets if isinstance(targets, str) else list(targets),
        "memory_budget": config.memory_budget,
        **config.core.model_dump(),
        **as_hashed(config.calibration.model_dump()),
    }


def moments_needed(config: RunConfig) -> frozenset[MomentName]:
    """What the configured method reads of the calibration data; nothing for one that needs none."""
    if config.is_baseline:
        return frozenset()
    core = core_config(config, ())
    return core.constructor_entry.needs(core.basis_options())


def save_adapter(model: PeftModel, folder: Path, start: Path) -> None:
    """Write an adapter aside and rename it into place.

    Args:
        start: Where the adapter was kept before training; only a method that changes its base reads it.
    """
    with whole_folder(folder, overwrite=True) as aside:
        if frozen_core_layers(model, "default"):
            model.save_pretrained(str(aside))
        else:
            save_baseline(model, aside, start)


def basis_fingerprint(model: nn.Module) -> str:
    """SHA-256 of every layer's P and Q."""
    layers = frozen_core_layers(model, "default")
    factors = {name: layer.factors("default")[:2] for name, layer in sorted(layers.items())}
    return fingerprint_tensors(
        (f"{name}.{side}", X) for name, pair in factors.items() for side, X in zip("PQ", pair, strict=True)
    )


def resolve_targets(config: RunConfig, model: PreTrainedModel) -> Targets:
    """The layers to adapt: those named, or the model's attention projections, which the paper adapts.

    Raises:
        ConfigError: A name matches no layer, or the architecture is not known and nothing was named.
    """
    if config.targets is None:
        return _attention_projections(model)
    if config.targets != "all-linear":
        _require_each(model, config.targets)
    return config.targets


def attention_shapes(model: PreTrainedModel) -> tuple[tuple[int, int], ...]:
    """(m, n) of every attention projection; none where they are not known."""
    names = FrozenCoreModel.target_module_mapping.get(model.config.model_type, [])
    return tuple(
        layer_shape(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name.rpartition(".")[2] in names
    )


def _attention_projections(model: PreTrainedModel) -> tuple[str, ...]:
    names = FrozenCoreModel.target_module_mapping.get(model.config.model_type)
    if names is None:
        raise ConfigError(
            f"The attention projections of a {model.config.model_type!r} model are not known here. "
            f"Name its layers with --targets, or use --targets all-linear. It has: {', '.join(_linear_names(model))}."
        )
    present = _linear_names(model)
    return tuple(name for name in names if name in present)


def _require_each(model: nn.Module, targets: Sequence[str]) -> None:
    """Refuse a name that matches no layer: a typo among several would otherwise go unseen."""
    present = {name for name, _ in model.named_modules()}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in present):
            raise ConfigError(
                f"--targets {target!r} matches no layer of this model. Its linear layers are called "
                f"{', '.join(_linear_names(model))}; or use all-linear."
            )


def _linear_names(model: nn.Module) -> list[str]:
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    return sorted({name.rpartition(".")[2] for name in linear})
