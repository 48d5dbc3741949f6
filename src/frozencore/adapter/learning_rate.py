"""The learning rate of cores, from the gradients g of the losses of single examples at R = 0.

The first step of AdamW at the rate η is ``-η sign(E g)``. Two facts bound it:

    ½ η² E‖g‖²               the divergence of a step with signs in no order, to second order; E‖g‖² is the trace of the
                             empirical Fisher matrix. The rate begins at ``c / √E‖g‖²``.
    L(-η sign(E g))          the loss after the step. The rate is halved while half a step ends at a loss that is lower
                             by a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from frozencore.adapter.layer import FrozenCoreLinear, only_adapter
from frozencore.calibration.batches import Batch, can_split, example_at, num_examples_of
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import examples_with_loss, loss_of, on_device
from frozencore.calibration.hooks import Hooks, LossFn
from frozencore.calibration.preserve import preserved
from frozencore.device import execution_device
from frozencore.distributed import all_ranks_or_none, sum_over_ranks
from frozencore.quiet import with_attributes
from frozencore.text import Progress

FISHER_STEP = 0.8
"""c: the longest step in the Fisher metric, chosen on the models and data sets of docs/method.md."""
NUM_EXAMPLES = 16
"""Examples whose gradients and losses are measured, evenly spaced among those of the calibration."""
LOWER, MOST_HALVINGS = 0.9, 12


def proposed_learning_rate(
    model: nn.Module,
    layers: Mapping[str, FrozenCoreLinear],
    adapter_name: str,
    batches: Sequence[Batch],
    *,
    loss_fn: LossFn | None = None,
    progress: Progress | None = None,
) -> float | None:
    """Propose the peak learning rate of an adapter's cores for AdamW.

    An example's loss is the mean over its completion tokens, as in training, whatever the moments weigh.

    Every process of a group calls this with its own batches, and all get the same rate. The model is as before
    afterwards. Each of :data:`NUM_EXAMPLES` examples takes a pass forward and back, and some passes forward.

    Args:
        layers: The layers of the adapter, whose bases are set.
        batches: As for :func:`frozencore.calibrate`.

    Returns:
        The rate; None if the gradients are zero, or not finite.

    Raises:
        CalibrationError, ConfigError: As :func:`frozencore.calibrate`.
    """
    examples = evenly_spaced(model, batches, NUM_EXAMPLES, whole=loss_fn is not None)
    hooks = Hooks({}, frozenset(), CalibrationOptions(), loss_fn)
    with preserved(model), _active_at_zero(model, layers, adapter_name) as cores:
        with all_ranks_or_none():
            squares, gradient = summed_gradients(model, cores, examples, hooks, progress)
        squares, gradient = sum_over_ranks(squares), sum_over_ranks(gradient)
        count = float(sum_over_ranks(torch.tensor(float(len(examples)), dtype=torch.float64)))
        if not 0 < float(squares) < math.inf:
            return None

        def loss_after(rate: float) -> float:
            step = torch.split(gradient.sign() * -rate, [core.numel() for core in cores])
            for core, part in zip(cores, step, strict=True):
                core.data.copy_(part.view_as(core))
            with all_ranks_or_none(), torch.no_grad():
                total = sum(float(_loss(model, example, hooks)) for example in examples)
            return float(sum_over_ranks(torch.tensor(total, dtype=torch.float64)))

        rate = FISHER_STEP / math.sqrt(float(squares) / count)
        loss = loss_after(rate)
        for _ in range(MOST_HALVINGS):
            half = loss_after(rate / 2)
            if math.isfinite(loss) and not half < loss - (1 - LOWER) * abs(loss):
                break
            rate, loss = rate / 2, half
    return rate


@contextmanager
def _active_at_zero(
    model: nn.Module, layers: Mapping[str, FrozenCoreLinear], adapter_name: str
) -> Iterator[list[Tensor]]:
    """Compute with this adapter alone, its cores zero and trainable; afterwards they are as before."""
    with ExitStack() as undo:
        undo.enter_context(only_adapter(model, adapter_name))
        cores: list[Tensor] = []
        for layer in layers.values():
            core = layer.core(adapter_name)
            undo.enter_context(with_attributes(core, grad=None, data=torch.zeros_like(core)))
            core.requires_grad_(True)
            cores.append(core)
        yield cores


def summed_gradients(
    model: nn.Module,
    cores: Sequence[Tensor],
    examples: Sequence[Batch],
    hooks: Hooks,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """``Σ ‖g‖²`` and ``Σ g`` (all values of the cores) over single examples, in float64 on the CPU."""
    squares, gradient = torch.zeros((), dtype=torch.float64), torch.zeros(sum(core.numel() for core in cores)).double()
    for number, example in enumerate(examples, start=1):
        _loss(model, example, hooks).backward()  # checkpointed blocks refuse torch.autograd.grad
        gradients = [torch.zeros_like(core) if core.grad is None else core.grad for core in cores]
        g = torch.cat([one.flatten().to("cpu", torch.float64) for one in gradients])
        squares += g.square().sum()
        gradient += g
        for core in cores:
            core.grad = None
        if progress is not None:
            progress("rate", number, len(examples))
    return squares, gradient


def _loss(model: nn.Module, example: Batch, hooks: Hooks) -> Tensor:
    example, batch = on_device(example, execution_device(model), hooks)
    return loss_of(model, batch, example, hooks) / num_examples_of(example)


def evenly_spaced(model: nn.Module, batches: Sequence[Batch], count: int, *, whole: bool = False) -> list[Batch]:
    """Examples as batches of one, evenly spaced; whole batches, of so many examples in all, where they stay together.

    Args:
        whole: Keep every batch whole, because a loss of the user's own may compare its rows.
    """
    if whole or not all(map(can_split, batches)):
        wanted = math.ceil(count * len(batches) / max(1, sum(map(num_examples_of, batches))))
        return [batches[i] for i in _evenly(len(batches), wanted)]
    places = [(batch, i) for batch in batches for i in examples_with_loss(model, batch)]
    return [example_at(*places[i]) for i in _evenly(len(places), count)]


def _evenly(size: int, count: int) -> list[int]:
    count = min(size, count)
    return [number * size // count for number in range(count)]
