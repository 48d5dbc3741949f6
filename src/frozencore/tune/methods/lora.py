"""LoRA, DoRA and PiSSA through PEFT, at the rank and on the targets of the frozen cores.

Scale 1 (``lora_alpha = r``) and no dropout. They train about ``r (m + n)`` values a layer, where a core trains ``r r``,
with smaller steps.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from frozencore.tune.methods.from_peft import FromPEFT, as_peft_takes
from frozencore.tune.methods.method import AdapterOptions

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class LoRA(FromPEFT):
    """Both factors train; with ``use_dora`` also a magnitude for each output."""

    use_dora: bool = False
    initialisation: ClassVar[Literal[True, "pissa"]] = True

    unread: ClassVar[tuple[str, ...]] = ("refresh_cost", "refresh_memory")

    @property
    def adds_up(self) -> bool:
        """True for plain factors: their sum is a LoRA of higher rank (:mod:`frozencore.tune.training.lora_rounds`)."""
        return not self.use_dora and self.initialisation is True

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
