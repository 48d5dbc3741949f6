"""TinyLoRA (arXiv 2602.04118) through PEFT: a short vector a layer, spread by fixed random matrices over a core of r².

The core stands between the leading singular vectors of the weight, as LoRA-XS's does; the paper takes r = 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from frozencore.constructors.basis_options import trained_values
from frozencore.tune.methods.from_peft import FromPEFT, as_peft_takes
from frozencore.tune.methods.method import AdapterOptions, Budget
from frozencore.tune.methods.targeted import targeted_layers

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn

VALUES_A_LAYER = 64  # PEFT's default


@dataclass(frozen=True, kw_only=True)
class TinyLoRA(FromPEFT):
    """A budget is shared equally by the layers; one of fewer values than layers is one vector for all of them."""

    budget: ClassVar[Budget | None] = "beside the rank"
    frozen_can_be_made_again: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import TinyLoraConfig

        length, tied = VALUES_A_LAYER, False
        if options.rank_budget is not None:
            budget = trained_values(options.rank_budget)
            num_layers = max(1, len(targeted_layers(model, options.targets)))
            tied = budget < num_layers
            length = budget if tied else budget // num_layers
        return TinyLoraConfig(
            r=options.rank,
            u=length,
            weight_tying=float(tied),
            projection_seed=options.seed,
            target_modules=as_peft_takes(options),
            task_type="CAUSAL_LM",
        )
