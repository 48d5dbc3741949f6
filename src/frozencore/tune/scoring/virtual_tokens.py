"""Virtual tokens, which a prompt-tuned model puts before every row: they shift what is read, and are no layer's."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from frozencore.tune.scoring.mode import base_of, forward_accepts


def num_virtual_tokens(model: nn.Module) -> int:
    """How many positions stand before a row's own; 0 for every other model."""
    if not isinstance(model, PeftModel) or not model.active_peft_config.is_prompt_learning:
        return 0
    count: int = model.active_peft_config.num_virtual_tokens
    return count


def logits_at(model: nn.Module, positions: Tensor, **inputs: Any) -> Tensor:
    """Logits at some positions of all rows, (rows, positions, vocabulary); nowhere else are they computed, if the
    model can be told so."""
    positions = positions + num_virtual_tokens(model)
    if forward_accepts(model, "logits_to_keep"):
        return model(**inputs, logits_to_keep=positions).logits
    return model(**inputs).logits[:, positions]


def generating(model: nn.Module) -> Any:
    """What generates: the transformers model, whose layers carry the adapters, unless tokens are put before it."""
    return model if num_virtual_tokens(model) else base_of(model)


def take_off(model: PeftModel) -> nn.Module:
    """The transformers model as it was before it had an adapter."""
    if not num_virtual_tokens(model):
        copied = {
            n: m.original_module for n, m in base_of(model).named_modules() if isinstance(m, ModulesToSaveWrapper)
        }
        bare: nn.Module = model.unload()  # which leaves the trained copies of whole modules in their places
        for name, module in copied.items():
            bare.set_submodule(name, module)
        return bare
    base = base_of(model)
    base.prepare_inputs_for_generation = model.base_model_prepare_inputs_for_generation
    plain: nn.Module = base
    return plain
