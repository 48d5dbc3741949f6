"""Run a model for scoring: in evaluation mode, with or without a PEFT wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from frozencore.calibration.batches import IGNORED
from frozencore.calibration.preserve import plain_passes

NOT_FINITE = (
    "are not finite. Look for NaN in the weights of the model, and for a core that is too large in its adapter: "
    "`frozencore inspect` shows the norms."
)


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for one example.

    Attributes:
        prediction: The chosen choice, or the generated number in normal form; ``None`` for no answer.
        logprobs: Choice tasks: the compared log-likelihood of each choice, in nats.
        text: Generated tasks: the generated text, without the prompt.
    """

    id: str
    prediction: str | None
    gold: str
    correct: bool
    logprobs: tuple[float, ...] = ()
    text: str = ""


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
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if forward_accepts(model, "logits_to_keep"):
        logits = model(**inputs, logits_to_keep=wanted).logits
    else:
        logits = model(**inputs).logits[:, wanted]
    targets = targets[:, wanted]
    counted = targets != IGNORED
    return token_logprobs(logits, targets.clamp_min(0)) * counted, counted


def unload_adapter(model: PeftModel) -> nn.Module:
    """Remove the adapter and return the original transformers model."""
    base: Any = base_of(model)
    copied = {name: m.original_module for name, m in base.named_modules() if isinstance(m, ModulesToSaveWrapper)}
    bare: nn.Module = model.unload()  # leaves trained copies of whole modules in place
    for name, module in copied.items():
        bare.set_submodule(name, module)
    return bare
