"""A calibration pass leaves the model as it found it: modes, gradients flags, checkpointing, and every RNG."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from frozencore.calibration.quantised import use_training_kernels
from frozencore.randomness import own_random_state


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no dropout, no weight gradients inside; everything as before outside, also after an error.

    Gradient checkpointing stays on where the user turned it on.
    """
    with ExitStack() as undo:
        undo.enter_context(own_random_state())
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        for parameter in model.parameters():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
        model.eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        use_training_kernels(model, undo)
        _without_cache(model, undo)
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                _checkpoint_without_dropout(module, undo)
        yield


def _without_cache(model: nn.Module, undo: ExitStack) -> None:
    """A key/value cache is memory for nothing here, and a checkpointed block that runs again would extend it."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            undo.callback(setattr, config, "use_cache", config.use_cache)
            config.use_cache = False


def _checkpoint_without_dropout(block: nn.Module, undo: ExitStack) -> None:
    """A block checkpoints only in training mode, in which it would also apply the dropout that it holds as a number."""
    block.training = True
    for name, value in vars(block).items():
        if "dropout" in name and isinstance(value, float):
            undo.callback(setattr, block, name, value)
            setattr(block, name, 0.0)
    let_input_require_gradient(block, undo)


def let_input_require_gradient(block: nn.Module, undo: ExitStack) -> None:
    """Reentrant checkpointing builds no graph unless an input of the block requires a gradient."""
    handle = block.register_forward_pre_hook(
        lambda _, args: (args[0].requires_grad_(), *args[1:]) if args and args[0].is_leaf else None
    )
    undo.callback(handle.remove)
