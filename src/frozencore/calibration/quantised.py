"""Quantised layers that change in evaluation: calibration, training and evaluation must see one base model.

Both cases are bitsandbytes on CPUs (0.50). ``Linear8bitLt`` rounds its inputs to 8 bits in evaluation only. On CPUs
with AVX512-BF16 ``Linear4bit`` rewrites its weight at the first evaluation: the scales are rounded to bfloat16, no
gradient passes any more, and PEFT dequantises the new layout to noise without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import resolve_quantization_backend
from torch import Tensor, nn

from frozencore.errors import ModelError


def use_training_kernels(model: nn.Module, undo: ExitStack) -> None:
    """Let quantised layers compute as in training; they hold no dropout, so nothing becomes random.

    Their modes must be restored by the caller.

    Raises:
        ModelError: A weight was rewritten for inference. Later, in a forward pass: a layer passes no gradient.
    """
    for name, module in model.named_modules():
        if _is_quantised(module):
            refuse_rewritten(module, name)
            module.training = True
            undo.callback(module.register_forward_hook(_refuses_cut(name)).remove)
            for parameter in module.parameters():  # bitsandbytes casts a bias for good to the dtype of what comes in
                undo.callback(setattr, parameter, "data", parameter.data)


def keep_weights(model: nn.Module) -> None:
    """Stop quantised layers from rewriting their weights in evaluation. Kernels for short inputs are slower then."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 - no attribute of nn.Module


def refuse_rewritten(layer: nn.Module, name: str) -> None:
    """Refuse a layer whose 4-bit weight was rewritten for inference; the rounding cannot be undone."""
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError(
            f"Layer {name!r} was evaluated before, and bitsandbytes rewrote its 4-bit weight for inference on this "
            "CPU: rounded, without gradients, unreadable. Load the model again, and add the adapter before it is run."
        )


def _refuses_cut(name: str) -> Callable[..., None]:
    """A hook: the gradient of a layer before this one would lack what flows through here, and nobody would notice."""

    def hook(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        if torch.is_grad_enabled() and args and args[0].requires_grad and not y.requires_grad:
            raise ModelError(
                f"Quantised layer {name!r} passes no gradient to its input, so nothing before it can be calibrated or "
                "trained. Use weight-only quantisation, or a constructor that needs no gradient."
            )

    return hook


def _is_quantised(module: nn.Module) -> bool:
    # PEFT asks for torchao's quantiser, which only storing a weight would use.
    backend = resolve_quantization_backend(module, get_apply_tensor_subclass=object)
    return backend is not None and not isinstance(module, BaseTunerLayer)  # which shows its base layer's weight
