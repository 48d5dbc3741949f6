"""(IA)³ (Liu et al., 2022) through PEFT: a factor for every output of a layer.

A feed-forward block's last projection is scaled at its inputs instead, as in the paper, where PEFT knows which layer of
the architecture that is. It has no rank: what it trains is decided by the targets alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from frozencore.tune.methods.from_peft import FromPEFT, as_peft_takes
from frozencore.tune.methods.method import AdapterOptions

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class IA3(FromPEFT):
    """Scales of outputs, and of the inputs of feed-forward projections; all start at one."""

    unread: ClassVar[tuple[str, ...]] = ("rank",)

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import IA3Config
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as KNOWN

        last = KNOWN.get(cast(Any, model).config.model_type, [])
        if options.targets != "all-linear":
            last = [target for target in options.targets if target.rpartition(".")[2] in last]
        return IA3Config(target_modules=as_peft_takes(options), feedforward_modules=last, task_type="CAUSAL_LM")
