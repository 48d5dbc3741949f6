"""PEFT's own methods: each is a PEFT configuration, seeded by the run."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from frozencore.errors import ConfigError
from frozencore.tune.methods.method import AdapterOptions, Method

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class FromPEFT(Method):
    """A method of PEFT at the rank and on the targets of frozen cores, in float32 also on a 16-bit base."""

    @abstractmethod
    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        """The configuration for PEFT."""

    def add(self, model: nn.Module, options: AdapterOptions, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        """Add the adapter; the global random state is restored."""
        import torch
        from peft import get_peft_model

        if options.rank < 1:
            raise ConfigError(f"A rank must be at least 1, got {options.rank}.")
        with torch.random.fork_rng():
            torch.manual_seed(options.seed)
            try:
                return get_peft_model(model, self.config(options, model))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"The targets {options.targets!r} cannot carry {self.label}: {error}") from error


def as_peft_takes(options: AdapterOptions) -> str | list[str]:
    """The targets in the form of a PEFT configuration."""
    return options.targets if isinstance(options.targets, str) else list(options.targets)


@dataclass(frozen=True, kw_only=True)
class LoRA(FromPEFT):
    """LoRA, and DoRA with ``use_dora``, which also trains a magnitude for each output.

    Scale 1 (``lora_alpha = r``) and no dropout. The factors are about ``r (m + n)`` values a layer, where a core has
    ``r r``, and train with smaller steps.
    """

    use_dora: bool = False
    initialisation: ClassVar[Literal[True, "pissa"]] = True

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import LoraConfig

        return LoraConfig(
            r=options.rank,
            lora_alpha=options.rank,
            lora_dropout=0.0,
            bias="none",
            target_modules=as_peft_takes(options),
            init_lora_weights=self.initialisation,
            use_dora=self.use_dora,
            task_type="CAUSAL_LM",
        )


@dataclass(frozen=True, kw_only=True)
class PiSSA(LoRA):
    """LoRA whose factors start as the leading part of every base weight, which is subtracted from the weight.

    This changes the base model in place, so the factors alone do not fit the original model. The saved adapter is
    therefore the difference from the start: a plain LoRA of twice the rank, which loads on the original weights.
    """

    initialisation: ClassVar[Literal[True, "pissa"]] = "pissa"
    changes_base: ClassVar[bool] = True

    def keep_start(self, model: PeftModel, folder: Path) -> None:
        model.save_pretrained(str(folder))

    def _write(self, model: PeftModel, folder: Path, start: Path) -> None:
        with warnings.catch_warnings():  # PEFT warns to convert although it converts here
            warnings.filterwarnings("ignore", message="PiSSA changes the base weights")
            model.save_pretrained(str(folder), path_initial_model_for_weight_conversion=str(start))
