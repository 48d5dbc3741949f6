"""PiSSA: LoRA whose factors start as the leading part of every base weight, which the base model loses.

The base model is thereby changed in place, and the factors mean nothing on an unchanged one. What is saved is therefore
the difference from the start, a plain LoRA of twice the rank, which loads on the original weights.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from frozencore.tune.methods.lora import LoRA

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, kw_only=True)
class PiSSA(LoRA):
    """LoRA from the principal components of the weights."""

    initialisation: ClassVar[Literal[True, "pissa"]] = "pissa"
    changes_base: ClassVar[bool] = True

    def keep_start(self, model: PeftModel, folder: Path) -> None:
        model.save_pretrained(str(folder))

    def _write(self, model: PeftModel, folder: Path, start: Path) -> None:
        with warnings.catch_warnings():  # PEFT advises the very conversion that it is doing here
            warnings.filterwarnings("ignore", message="PiSSA changes the base weights")
            model.save_pretrained(str(folder), path_initial_model_for_weight_conversion=str(start))
