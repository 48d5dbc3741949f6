"""The learning rate of cores from their Fisher metric: ``η = c / √E‖g‖²``.

g is the gradient of the loss of one example in all cores R, at R = 0; E‖g‖² is the trace of the empirical Fisher.
AdamW moves every entry of R by about η in a step, so a step with signs in no order changes the model by a divergence of
about ½η² E‖g‖² = ½c² nats an example. It is the same for every model, basis and scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.calibration.batches import Batch, mapped, num_examples_of, tensors_of
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import loss_of, on_device
from frozencore.calibration.hooks import Hooks, LossFn
from frozencore.calibration.preserve import preserved
from frozencore.device import execution_device
from frozencore.distributed import all_ranks_or_none, sum_over_ranks
from frozencore.quiet import with_attributes

FISHER_STEP = 0.5
"""c: the size of a step in the Fisher metric, chosen on the models and data sets of docs/method.md."""
NUM_EXAMPLES = 16
"""Examples whose gradients are measured, evenly spaced among those of the calibration."""


def fisher_learning_rate(
    model: nn.Module,
    layers: Mapping[str, FrozenCoreLinear],
    adapter_name: str,
    batches: Sequence[Batch],
    *,
    options: CalibrationOptions,
    loss_fn: LossFn | None = None,
) -> float | None:
    """Propose the peak learning rate of an adapter's cores for AdamW.

    Every process of a group calls this with its own batches, and all get the same rate. The model is as before
    afterwards. It takes a pass forward and back for each of :data:`NUM_EXAMPLES` examples.

    Args:
        layers: The layers of the adapter, whose bases are set.
        batches: As for :func:`frozencore.calibrate`.

    Returns:
        The rate; None if the gradients are zero, or if no batch can be split into its examples.

    Raises:
        CalibrationError, ConfigError: As :func:`frozencore.calibrate`.
    """
    with all_ranks_or_none():
        squares = squared_gradients(model, layers, adapter_name, batches, Hooks({}, frozenset(), options, loss_fn))
    own = torch.tensor([sum(squares), len(squares)], dtype=torch.float64)
    total, count = sum_over_ranks(own).tolist()
    return FISHER_STEP / math.sqrt(total / count) if total > 0 else None


def squared_gradients(
    model: nn.Module, layers: Mapping[str, FrozenCoreLinear], adapter_name: str, batches: Sequence[Batch], hooks: Hooks
) -> list[float]:
    """‖g‖² of the loss of single examples in all cores of an adapter."""
    squares: list[float] = []
    with preserved(model), ExitStack() as undo:
        cores = [layer.core(adapter_name).requires_grad_(True) for layer in layers.values()]
        for layer, core in zip(layers.values(), cores, strict=True):
            undo.enter_context(with_attributes(layer, _active_adapter=[adapter_name], _disable_adapters=False))
            undo.enter_context(with_attributes(core, grad=None))
        for example in evenly_spaced(batches, NUM_EXAMPLES):
            example, batch = on_device(example, execution_device(model), hooks)
            loss_of(model, batch, example, hooks).backward()  # checkpointed blocks refuse torch.autograd.grad
            gradients = [core.grad for core in cores if core.grad is not None]
            squares.append(sum(float(gradient.double().square().sum()) for gradient in gradients))
            for core in cores:
                core.grad = None
    return squares


def evenly_spaced(batches: Sequence[Batch], count: int) -> Iterator[Batch]:
    """Yield so many batches of one example each, evenly spaced among those that can be split."""
    places = [(batch, i) for batch in batches if can_split(batch) for i in range(num_examples_of(batch))]
    for number in range(min(count, len(places))):
        batch, i = places[number * len(places) // min(count, len(places))]
        yield mapped(batch, partial(_row, i))


def _row(i: int, tensor: Tensor) -> Tensor:
    return tensor[i : i + 1] if tensor.ndim else tensor


def can_split(batch: Batch) -> bool:
    """Return whether each tensor of a batch has a row for each example; patches of images have not."""
    return all(len(tensor) == num_examples_of(batch) for tensor in tensors_of(batch) if tensor.ndim)
