"""LoRA, DoRA and PiSSA through PEFT, at the rank and on the targets of the frozen cores.

All have scale 1 (``lora_alpha = r``) and no dropout. They train about ``r (m + n)`` values a layer where a core trains
``r r``, at smaller steps: the learning rates are the middle of the customary range for each, to be searched around.

PiSSA moves the leading part of every base weight into its factors. The base model is thereby changed in place and must
not be used for anything else; and its factors mean nothing on an unchanged base. ``save_baseline`` therefore saves the
difference from the start as a plain LoRA of twice the rank, which loads on the original weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from frozencore.errors import ConfigError


@dataclass(frozen=True)
class Baseline:
    """One parameterisation of PEFT's LoRA and the learning rate it is usually given."""

    init_lora_weights: Literal[True, "pissa"]
    use_dora: bool
    learning_rate: float


BASELINES: dict[str, Baseline] = {
    "lora": Baseline(init_lora_weights=True, use_dora=False, learning_rate=1e-3),
    "dora": Baseline(init_lora_weights=True, use_dora=True, learning_rate=1e-3),
    "pissa": Baseline(init_lora_weights="pissa", use_dora=False, learning_rate=2e-4),
}


def add_baseline(
    model: nn.Module, name: str, *, rank: int, target_modules: Sequence[str] | str, seed: int
) -> PeftModel:
    """Wrap a base model in a baseline's trainable adapter, float32 also on a 16-bit base.

    Args:
        seed: Of LoRA's random factor; the global random state is left as it was.

    Raises:
        ConfigError: The name is unknown, the rank is not positive, or no module matches the targets.
    """
    if name not in BASELINES:
        raise ConfigError(f"There is no baseline {name!r}. Known baselines: {', '.join(BASELINES)}.")
    if rank < 1:
        raise ConfigError(f"A rank must be at least 1, got {rank}.")
    baseline = BASELINES[name]
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
        init_lora_weights=baseline.init_lora_weights,
        use_dora=baseline.use_dora,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"The targets {target_modules!r} cannot carry {name}: {error}") from error


def save_start(model: PeftModel, folder: Path) -> None:
    """Keep the adapter as it is before training, for :func:`save_baseline`; does nothing where it is not needed."""
    if _changes_base(model):
        model.save_pretrained(str(folder))


def save_baseline(model: PeftModel, folder: Path, start: Path) -> None:
    """Save a trained baseline so that ``PeftModel.from_pretrained`` restores it on the original base weights.

    Args:
        start: Where :func:`save_start` kept the adapter.
    """
    if not _changes_base(model):
        model.save_pretrained(str(folder))
        return
    with warnings.catch_warnings():  # PEFT advises the very conversion that it is doing here
        warnings.filterwarnings("ignore", message="PiSSA changes the base weights")
        model.save_pretrained(str(folder), path_initial_model_for_weight_conversion=str(start))


def _changes_base(model: Any) -> bool:
    return any(config.init_lora_weights == "pissa" for config in model.peft_config.values())
