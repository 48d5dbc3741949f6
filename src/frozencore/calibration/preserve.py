"""Restore the model after a calibration pass: modes, gradient flags, checkpointing, and every RNG.

Two kinds of quantised layers of bitsandbytes (0.50, on CPUs) change in evaluation, but calibration, training and
evaluation must see the same base model. ``Linear8bitLt`` rounds its inputs to 8 bits in evaluation only. On CPUs with
AVX512-BF16 ``Linear4bit`` rewrites its weight at the first evaluation: it rounds the scales to bfloat16 and passes no
gradient any more, and PEFT then dequantises the weight to noise without an error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import resolve_quantization_backend
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from frozencore.attributes import with_attributes
from frozencore.errors import ModelError


@contextmanager
def calibration_mode(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and weight gradients inside; restore everything afterwards, also after an error.

    Gradient checkpointing stays on where the user turned it on.
    """
    with ExitStack() as undo:
        undo.enter_context(own_random_state())
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
            for name, parameter in module.named_parameters(recurse=False):
                undo.callback(_set_requires_grad, module, name, parameter.requires_grad)
                parameter.requires_grad_(False)
        model.eval()
        _use_training_kernels(model, undo)
        undo.enter_context(without_randomness(model))
        for module in model.modules():
            # a cache wastes memory, and a checkpointed block that runs again would extend it
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", None):
                undo.enter_context(with_attributes(config, use_cache=False))
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                module.training = True  # it checkpoints in training mode only
                # reentrant checkpointing builds a graph only if an input requires a gradient
                handle = module.register_forward_pre_hook(
                    lambda _, args: (args[0].requires_grad_(), *args[1:]) if args and args[0].is_leaf else None
                )
                undo.callback(handle.remove)
        yield


def _set_requires_grad(module: nn.Module, name: str, flag: bool) -> None:
    """Set the flag of the parameter that is there now: accelerate's offloading replaces parameters in each pass."""
    getattr(module, name).requires_grad_(flag)


# Parts of names of attributes that make a pass random or add a loss: dropout and layerdrop, a router's noise, a loss on
# the size of logits, and masks that hide parts of a sound.
RATES = ("drop", "jitter", "z_loss", "mask_time_prob", "mask_feature_prob")


@contextmanager
def without_randomness(model: nn.Module) -> Iterator[None]:
    """Let each pass compute the rows' loss alone, without randomness; restore the model afterwards.

    Every rate of dropout, of skipped layers and of a router's noise is zero. transformers keeps such a rate as the
    ``p`` of a module, as a number of the module that calls a function (``dropout``, ``activation_dropout``,
    ``layerdrop``), or reads it from the configuration in each pass. Losses beside the loss of the rows are
    off: a router's (``output_router_logits``) and one on the size of all logits (``z_loss``). They are means over a
    pass, so a step's gradient would depend on its batches. Routers stay in evaluation, because PhiMoE's draws
    experts in training.
    """
    with ExitStack() as undo:
        owners: dict[int, Any] = {}
        for module in model.modules():
            owners[id(module)] = module
            _add_configs(getattr(module, "config", None), owners)
        for owner in owners.values():
            is_module_of_torch = isinstance(owner, nn.modules.dropout._DropoutNd)
            for name, value in list(vars(owner).items()):
                is_rate = any(part in name for part in RATES) or (is_module_of_torch and name == "p")
                is_rate = is_rate and name != "router_jitter_noise"  # PhiMoE masks experts by it in evaluation too
                if is_rate and isinstance(value, int | float) and not isinstance(value, bool) and value:
                    undo.enter_context(with_attributes(owner, **{name: 0.0}))
                elif name == "output_router_logits" and value is True:
                    undo.enter_context(with_attributes(owner, output_router_logits=False))
            if isinstance(owner, nn.Module) and type(owner).__name__.endswith("Router"):
                undo.callback(setattr, owner, "training", owner.training)
                owner.training = False
                vars(owner)["train"] = lambda _=True, router=owner: router  # which a trainer calls in each step
                undo.callback(vars(owner).pop, "train")
        yield


def _add_configs(config: Any, configs: dict[int, Any]) -> None:
    """Add a configuration and those inside it."""
    if isinstance(config, PretrainedConfig) and id(config) not in configs:
        configs[id(config)] = config
        for inner in vars(config).values():
            _add_configs(inner, configs)


@contextmanager
def own_random_state() -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch, on every device, afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _use_training_kernels(model: nn.Module, undo: ExitStack) -> None:
    """Let quantised layers and Mamba's blocks compute as in training; they have no dropout, so nothing becomes random.

    A Mamba block whose kernels are installed calls some of its layers in evaluation only: in training one kernel takes
    their weights, so that their cores would not be trained. Calibration then refuses them by name.

    The caller restores their modes.
    """
    for name, module in model.named_modules():
        module.training = module.training or isinstance(getattr(module, "A_log", None), nn.Parameter)
        # PEFT wants torchao's quantiser as an argument, but uses it only to store a weight, which does not happen here.
        backend = resolve_quantization_backend(module, get_apply_tensor_subclass=object)
        if backend is None or isinstance(module, BaseTunerLayer):  # a tuner layer shows its base layer's weight
            continue
        refuse_rewritten(module, name)
        module.training = True
        undo.callback(module.register_forward_hook(partial(_refuse_cut, name)).remove)
        for parameter in module.parameters():  # bitsandbytes casts a bias permanently to the dtype of its input
            undo.callback(setattr, parameter, "data", parameter.data)


def _refuse_cut(name: str, _: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
    """Refuse, as a hook, a layer that passes no gradient: earlier layers would silently get a wrong one."""
    if torch.is_grad_enabled() and args and args[0].requires_grad and not y.requires_grad:
        raise ModelError(
            f"Quantised layer {name!r} passes no gradient to its input, so nothing before it can be calibrated or "
            "trained. Use weight-only quantisation, or a constructor that needs no gradient."
        )


def disable_bnb_repacking(model: nn.Module) -> None:
    """Stop quantised layers from rewriting their weights in evaluation. Short inputs then take slower kernels."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 - no attribute of nn.Module


def refuse_rewritten(layer: nn.Module, name: str) -> None:
    """Raise an error if a layer's 4-bit weight was rewritten for inference; the rounding cannot be undone."""
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError(
            f"Layer {name!r} was evaluated before, and bitsandbytes rewrote its 4-bit weight for inference on this "
            "CPU: rounded, without gradients, unreadable. Load the model again, and add the adapter before it is run."
        )
