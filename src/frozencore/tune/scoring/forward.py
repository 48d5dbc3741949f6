"""Run a model for scoring: in evaluation mode, with or without a PEFT wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import LogitsProcessor

from frozencore.calibration.batches import IGNORED
from frozencore.calibration.preserve import plain_passes
from frozencore.errors import ModelError

NOT_FINITE = (
    "are not finite. Look for NaN in the weights of the model, and for a core that is too large in its adapter: "
    "`frozencore inspect` shows the norms."
)


@contextmanager
def scoring_mode(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode without gradients inside; restore every module's mode, also after an error."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode(), plain_passes(model):
            yield
    finally:
        for module, training in was_training.items():
            module.training = training


def base_of(model: nn.Module) -> Any:
    """The transformers model inside a PEFT model (its layers have the adapters), or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def vocabulary_of(model: nn.Module) -> int:
    """The number of logits at one position."""
    size: int = base_of(model).config.get_text_config().vocab_size
    return size


def forward_accepts(model: nn.Module, *names: str) -> bool:
    """Return whether the transformers model's forward accepts all these arguments."""
    return set(names) <= set(inspect.signature(base_of(model).forward).parameters)


def logits_at(model: nn.Module, positions: Tensor, **inputs: Any) -> Tensor:
    """Logits at some positions of all rows, (rows, positions, vocabulary).

    A model that takes ``logits_to_keep`` computes no others.
    """
    if forward_accepts(model, "logits_to_keep"):
        return model(**inputs, logits_to_keep=positions).logits
    return model(**inputs).logits[:, positions]


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of target tokens, in float32 or wider: logits (..., vocabulary), targets (...)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def completion_logprobs(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probabilities at positions where any row of a batch has a label, and a mask of each row's labels.

    Both are (rows, positions); a log-probability is 0 where there is no label.
    """
    targets = batch["labels"][:, 1:]
    wanted = (targets != IGNORED).any(0).nonzero().squeeze(-1)
    logits = logits_at(model, wanted, **{name: tensor for name, tensor in batch.items() if name != "labels"})
    targets = targets[:, wanted]
    counted = targets != IGNORED
    return token_logprobs(logits, targets.clamp_min(0)) * counted, counted


class RequireFinite(LogitsProcessor):
    """Stop a generation whose logits are not finite."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits unchanged.

        Raises:
            ModelError: The largest of a row is NaN or infinite.
        """
        if not bool(torch.isfinite(scores.amax(-1)).all()):
            raise ModelError(f"The logits of a generated token {NOT_FINITE}")
        return scores


def take_off(model: PeftModel) -> nn.Module:
    """Remove the adapter and return the original transformers model."""
    base: Any = base_of(model)
    copied = {name: m.original_module for name, m in base.named_modules() if isinstance(m, ModulesToSaveWrapper)}
    bare: nn.Module = model.unload()  # leaves trained copies of whole modules in place
    for name, module in copied.items():
        bare.set_submodule(name, module)
    return bare
