"""What PEFT's own methods have in common: a configuration of PEFT's, drawn from the run's seed alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frozencore.errors import ConfigError
from frozencore.tune.methods.method import AdapterOptions, Method

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class FromPEFT(Method):
    """A method of PEFT at the rank and on the targets of the frozen cores, float32 also on a 16-bit base."""

    @abstractmethod
    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        """What PEFT is told."""

    def add(self, model: nn.Module, options: AdapterOptions, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        """The global random state is left as it was."""
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
    """The targets, as a configuration of PEFT takes them."""
    return options.targets if isinstance(options.targets, str) else list(options.targets)
