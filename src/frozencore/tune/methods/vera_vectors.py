"""VeRA (Kopiczko et al., 2024) through PEFT: two vectors a layer around one random pair of factors for all layers.

A layer of m outputs trains ``r + m`` values. The constructor ``vera`` freezes the same random pair and trains a core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from frozencore.tune.methods.from_peft import FromPEFT, as_peft_takes
from frozencore.tune.methods.method import AdapterOptions

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class VeRAVectors(FromPEFT):
    """The random factors are drawn from the run's seed, and saved too, as is PEFT's default."""

    frozen_can_be_made_again: ClassVar[bool] = True

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import VeraConfig

        return VeraConfig(
            r=options.rank,
            projection_prng_key=options.seed,
            target_modules=as_peft_takes(options),
            task_type="CAUSAL_LM",
        )
