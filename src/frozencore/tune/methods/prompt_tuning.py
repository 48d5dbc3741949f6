"""Prompt tuning (Lester et al., 2021) through PEFT: virtual tokens before every row, of which the embeddings train.

They start as those of tokens drawn from the vocabulary, the better of the paper's starts that need no text. It has no
targets, and its rank is the number of virtual tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from frozencore.constructors.basis_options import trained_values
from frozencore.errors import ConfigError
from frozencore.tune.methods.from_peft import FromPEFT
from frozencore.tune.methods.method import AdapterOptions, Budget

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class PromptTuning(FromPEFT):
    """A budget is spent on as many virtual tokens as it pays for."""

    unread: ClassVar[tuple[str, ...]] = ("targets", "layers", "padding_free")
    budget: ClassVar[Budget | None] = "instead of the rank"

    def config(self, options: AdapterOptions, model: nn.Module) -> PeftConfig:
        from peft import PromptTuningConfig

        num_tokens = options.rank
        if options.rank_budget is not None:
            width = cast(Any, model).get_input_embeddings().embedding_dim
            num_tokens = trained_values(options.rank_budget) // width
            if num_tokens < 1:
                raise ConfigError(
                    f"A virtual token of this model is {width} values, but the budget is {options.rank_budget}: give "
                    f"--rank-budget {width} or more."
                )
        return PromptTuningConfig(
            num_virtual_tokens=num_tokens, prompt_tuning_init="SAMPLE_VOCAB", task_type="CAUSAL_LM"
        )
