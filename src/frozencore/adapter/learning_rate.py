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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.adapter.layer import BasisState, FrozenCoreLinear
from frozencore.adapter.loaded_adapter import only_adapter
from frozencore.adapter.shared_factors import SharedFactors
from frozencore.attributes import with_attributes
from frozencore.calibration.batches import Batch, can_split, example_at, num_examples_of
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import examples_with_loss, loss_of, on_device
from frozencore.calibration.hooks import LossFn, PassSpec
from frozencore.calibration.preserve import calibration_mode
from frozencore.device import execution_device
from frozencore.distributed import raise_on_any_rank, sum_over_ranks
from frozencore.maths.basis import LayerBasis
from frozencore.progress import Progress, no_progress

FISHER_STEP = 0.8
"""c: the longest step in the Fisher metric, chosen on the models and data sets of docs/learning-rate.md."""
NUM_EXAMPLES = 16
"""Examples whose gradients and losses are measured, evenly spaced among those of the calibration."""
LOWER, MOST_HALVINGS = 0.9, 12


def proposed_learning_rate(
    model: nn.Module,
    layers: Mapping[str, FrozenCoreLinear],
    adapter_name: str,
    batches: Sequence[Batch],
    *,
    bases: Mapping[str, LayerBasis] | None = None,
    loss_fn: LossFn | None = None,
    progress: Progress = no_progress,
) -> float | None:
    """Propose the peak learning rate of an adapter's cores for AdamW.

    An example's loss is the mean over its completion tokens, with any weighting of the moments. Batches whose examples
    cannot be taken apart give the mean gradients of several examples; E‖g‖² is then estimated from the variance between
    batches, and a single such batch proposes a rate that is too high.

    Every process of a group calls this with its batches, and all get the same rate. The model is as before
    afterwards. Each of :data:`NUM_EXAMPLES` examples takes a pass forward and back, and some passes forward.

    Args:
        layers: The layers of the adapter.
        batches: As for :func:`frozencore.calibrate`.
        bases: The bases to measure with; those of the adapter by default.

    Returns:
        The rate; None if the gradients are zero, or not finite.

    Raises:
        CalibrationError, ConfigError: As :func:`frozencore.calibrate`.
    """
    examples = evenly_spaced(model, batches, NUM_EXAMPLES, whole=loss_fn is not None)
    spec = PassSpec({}, frozenset(), CalibrationOptions(), loss_fn)
    with calibration_mode(model), _active_at_zero(model, layers, adapter_name, bases) as cores:
        with raise_on_any_rank():
            squares, gradient = summed_gradients(model, cores, examples, spec, progress)
        squares, gradient = sum_over_ranks(squares), sum_over_ranks(gradient)
        sizes = torch.tensor([len(examples), sum(map(num_examples_of, examples))], dtype=torch.float64)
        num_batches, num_examples = sum_over_ranks(sizes).tolist()
        if not 0 < float(squares) < math.inf:
            return None

        def loss_after(rate: float) -> float:
            step = torch.split(gradient.sign() * -rate, [core.numel() for core in cores])
            for core, part in zip(cores, step, strict=True):
                core.data.copy_(part.view_as(core))
            total = 0.0
            with raise_on_any_rank(), torch.no_grad():
                for number, example in enumerate(examples, start=1):
                    total += float(_summed_loss(model, example, spec))
                    progress("try rate", number, len(examples), f"{rate:.1e}")
            return float(sum_over_ranks(torch.tensor(total, dtype=torch.float64)))

        rate = FISHER_STEP / math.sqrt(mean_square(float(squares), gradient, num_batches, num_examples))
        loss = loss_after(rate)
        for _ in range(MOST_HALVINGS):
            half = loss_after(rate / 2)
            if math.isfinite(loss) and not half < loss - (1 - LOWER) * abs(loss):
                break
            rate, loss = rate / 2, half
    return rate


def mean_square(squares: float, gradient: Tensor, num_batches: float, num_examples: float) -> float:
    """Estimate E‖g‖² of single examples from the summed gradients S_b of batches of n_b examples.

        E‖g‖² = ‖ḡ‖² + (1 - 1/N) σ²,    σ² = (Σ_b ‖S_b‖²/n_b - N‖ḡ‖²) / (B - 1),    ḡ = Σ_b S_b / N

    σ² is the trace of the covariance of g, estimated without bias from the variance between batches. For batches of one
    example the result is the mean of ‖g‖².

    Args:
        squares: ``Σ_b ‖S_b‖²/n_b``.
        gradient: ``Σ_b S_b``.
        num_batches, num_examples: B and N.
    """
    if num_batches < 2:
        return squares / num_examples
    square_of_sum = float(gradient.square().sum())
    variance = (squares - square_of_sum / num_examples) / (num_batches - 1)
    return square_of_sum / num_examples**2 + (1 - 1 / num_examples) * variance


@contextmanager
def _active_at_zero(
    model: nn.Module,
    layers: Mapping[str, FrozenCoreLinear],
    adapter_name: str,
    bases: Mapping[str, LayerBasis] | None,
) -> Iterator[list[Tensor]]:
    """Compute with this adapter alone, on these bases, its cores zero and trainable; afterwards all is as before."""
    with ExitStack() as undo:
        undo.enter_context(only_adapter(model, adapter_name))
        cores: list[Tensor] = []
        for name, layer in layers.items():
            if bases is not None:
                undo.enter_context(_on_basis(layer, adapter_name, bases[name]))
            core = layer.core(adapter_name)
            undo.enter_context(with_attributes(core, grad=None, data=torch.zeros_like(core)))
            hooks: Any = core._post_accumulate_grad_hooks or {}  # an optimizer may step in one
            undo.callback(hooks.update, hooks.copy())
            hooks.clear()
            core.requires_grad_(True)
            cores.append(core)
        yield cores


def _on_basis(layer: FrozenCoreLinear, adapter_name: str, basis: LayerBasis) -> AbstractContextManager[None]:
    """Compute on this basis inside; the adapter's factors are not touched."""
    P, Q = SharedFactors(), SharedFactors()
    for new, factors, X in ((P, layer.frozencore_P, basis.P), (Q, layer.frozencore_Q, basis.Q)):
        for other in factors:  # a loss may compute with another adapter too, as DPO's does
            new[other] = factors[other]
        new[adapter_name] = X.to(factors[adapter_name].device, factors[adapter_name].dtype)
    state = layer.frozencore_state | {adapter_name: BasisState.READY}
    return with_attributes(layer, frozencore_P=P, frozencore_Q=Q, frozencore_state=state)


def summed_gradients(
    model: nn.Module,
    cores: Sequence[Tensor],
    batches: Sequence[Batch],
    spec: PassSpec,
    progress: Progress = no_progress,
) -> tuple[Tensor, Tensor]:
    """``Σ_b ‖S_b‖²/n_b`` and ``Σ_b S_b`` (all values of the cores), in float64 on the CPU.

    S_b is the gradient of the summed loss of the n_b examples of a batch.
    """
    squares = torch.zeros((), dtype=torch.float64, device="cpu")
    gradient = torch.zeros(sum(core.numel() for core in cores), dtype=torch.float64, device="cpu")
    for number, batch in enumerate(batches, start=1):
        _summed_loss(model, batch, spec).backward()  # checkpointed blocks refuse torch.autograd.grad
        gradients = [torch.zeros_like(core) if core.grad is None else core.grad for core in cores]
        S = torch.cat([one.flatten().to("cpu", torch.float64) for one in gradients])
        squares += S.square().sum() / num_examples_of(batch)
        gradient += S
        for core in cores:
            core.grad = None
        progress("rate", number, len(batches))
    return squares, gradient


def _summed_loss(model: nn.Module, batch: Batch, spec: PassSpec) -> Tensor:
    batch, there = on_device(batch, execution_device(model), spec)
    return loss_of(model, there, batch, spec)


def evenly_spaced(model: nn.Module, batches: Sequence[Batch], count: int, *, whole: bool = False) -> list[Batch]:
    """Draw examples, evenly spaced, as batches of one; where examples cannot be taken apart, whole batches.

    Args:
        whole: Keep every batch whole, because a user's loss may compare its rows.
    """
    if whole or not all(map(can_split, batches)):
        wanted = math.ceil(count * len(batches) / max(1, sum(map(num_examples_of, batches))))
        return [batches[i] for i in _evenly(len(batches), max(2, wanted))]  # two, because their difference is measured
    places = [(batch, i) for batch in batches for i in examples_with_loss(model, batch)]
    return [example_at(*places[i]) for i in _evenly(len(places), count)]


def _evenly(size: int, count: int) -> list[int]:
    count = min(size, count)
    return [number * size // count for number in range(count)]
