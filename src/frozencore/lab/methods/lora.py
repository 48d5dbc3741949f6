"""LoRA and DoRA through PEFT, at the rank and on the targets of the frozen cores.

Scale 1 (``lora_alpha = r``) and no dropout. They train about ``r (m + n)`` values a layer where a core trains ``r r``,
at smaller steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from frozencore.errors import ConfigError
from frozencore.lab.methods.method import AdapterOptions, Method

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LoRA(Method):
    """Both factors train, float32 also on a 16-bit base; a magnitude for each output beside them with ``use_dora``."""

    use_dora: bool = False
    initialisation: ClassVar[Literal[True, "pissa"]] = True

    def add(self, model: nn.Module, options: AdapterOptions, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        """The global random state is left as it was."""
        import torch
        from peft import LoraConfig, get_peft_model

        if options.rank < 1:
            raise ConfigError(f"A rank must be at least 1, got {options.rank}.")
        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.rank,
            lora_dropout=0.0,
            bias="none",
            target_modules=options.targets if isinstance(options.targets, str) else list(options.targets),
            init_lora_weights=self.initialisation,
            use_dora=self.use_dora,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():
            torch.manual_seed(options.seed)
            try:
                return get_peft_model(model, config)
            except ValueError as error:
                raise ConfigError(f"The targets {options.targets!r} cannot carry {self.label}: {error}") from error
