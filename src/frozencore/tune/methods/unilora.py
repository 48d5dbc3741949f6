"""Uni-LoRA (arXiv 2506.00799) through PEFT: every entry of every LoRA factor is one of the entries of one short vector.

Which one is drawn once from the seed, so that the number of trained values is free of rank, layers and model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from frozencore.constructors.basis_options import trained_values
from frozencore.tune.methods.from_peft import FromPEFT, as_peft_takes
from frozencore.tune.methods.method import AdapterOptions, Budget

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn

LENGTH = 256  # PEFT's default


@dataclass(frozen=True, kw_only=True)
class UniLoRA(FromPEFT):
    """A budget is the length of the vector."""

    budget: ClassVar[Budget | None] = "beside the rank"

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import UniLoraConfig

        return UniLoraConfig(
            r=options.rank,
            theta_d_length=LENGTH if options.rank_budget is None else trained_values(options.rank_budget),
            proj_seed=options.seed,
            target_modules=as_peft_takes(options),
            task_type="CAUSAL_LM",
        )
