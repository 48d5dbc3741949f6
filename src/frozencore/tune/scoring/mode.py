"""The state a model is scored in, and put back from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import nn


@contextmanager
def scoring_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode is back afterwards, also after an error."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in was_training.items():
            module.training = training


def base_of(model: nn.Module) -> Any:
    """The transformers model inside a PEFT one (its layers carry the adapters), or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def vocabulary_of(model: nn.Module) -> int:
    """The number of logits at one position."""
    size: int = base_of(model).config.get_text_config().vocab_size
    return size


def forward_accepts(model: nn.Module, *names: str) -> bool:
    """Whether the transformers model's forward pass knows all of these arguments."""
    return set(names) <= set(inspect.signature(base_of(model).forward).parameters)
