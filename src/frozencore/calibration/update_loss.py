"""Compute the loss of a model with an update of its layers, ``y + P R Qᵀ x``, without changing a weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from frozencore.calibration.batches import Batch, mapped, num_examples_of
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.counted_tokens import labels_of
from frozencore.calibration.loss import losses, predictions
from frozencore.calibration.taps import Taps
from frozencore.device import sent
from frozencore.maths.linalg import seeded_generator


@dataclass(frozen=True)
class Update:
    """The update ``L Qᵀ`` of one layer's weight, with ``L = P R``."""

    L: Float[Tensor, "m r"]
    Q: Float[Tensor, "n r"]

    def times(self, size: float) -> Update:
        return Update(self.L * size, self.Q)


@contextmanager
def tried(layers: Mapping[str, nn.Module], updates: Mapping[str, Update]) -> Iterator[None]:
    """Make the layers compute, inside the context, as if the updates were added to their weights."""
    with ExitStack() as undo:
        for name, update in updates.items():
            undo.callback(layers[name].register_forward_hook(partial(_plus, update)).remove)
        yield


class NotSideBySideError(Exception):
    """A layer does not see the batch's rows in order, so copies of the rows cannot be told apart there."""


@contextmanager
def tried_side_by_side(layers: Mapping[str, nn.Module], updates: Sequence[Mapping[str, Update]]) -> Iterator[None]:
    """Apply different updates, inside the context, to each of several copies of a batch's rows.

    Raises:
        NotSideBySideError: In a forward pass: a layer does not see rows of tokens (experts, for instance).
    """
    with ExitStack() as undo:
        for name in dict.fromkeys(name for one in updates for name in one):
            own = [one.get(name) for one in updates]
            width = max(update.L.shape[1] for update in own if update is not None)
            some = next(update for update in own if update is not None)
            nothing = Update(some.L[:, :0], some.Q[:, :0])
            L, Q = (
                torch.stack([pad(factor, (0, width - factor.shape[1])) for factor in factors])
                for factors in zip(*((update.L, update.Q) for update in (one or nothing for one in own)), strict=True)
            )
            undo.callback(layers[name].register_forward_hook(partial(_plus_each, L, Q)).remove)
        yield


def _plus_each(L: Tensor, Q: Tensor, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    x, copies = args[0], len(L)
    if x.ndim != 3 or len(x) % copies:
        raise NotSideBySideError
    parts = x.reshape(copies, -1, x.shape[-1])
    L, Q = (factor.to(x.device, x.dtype) for factor in (L, Q))
    return output + ((parts @ Q) @ L.mT).reshape(output.shape).to(output.dtype)


def _plus(update: Update, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    x = args[0]
    Q, L = (factor.to(x.device, x.dtype) for factor in (update.Q, update.L))
    return output + ((x @ Q) @ L.mT).to(output.dtype)


def mean_loss(model: nn.Module, batches: Iterable[Batch], options: CalibrationOptions) -> float:
    """The mean over the examples of the loss that calibration differentiates; no gradient is computed here.

    :func:`frozencore.calibration.preserve.preserved` must have prepared the model.
    """
    taps = Taps({}, frozenset({"cross"}), options)  # asks for the loss with the data's labels
    device, generator = next(model.parameters()).device, seeded_generator(options.seed)
    total, num_examples = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            sent_batch = mapped(batch, lambda tensor: sent(tensor, device))
            total += float(next(losses(model, sent_batch, batch, taps, generator)))
            num_examples += num_examples_of(batch)
    return total / num_examples


def mean_losses(model: nn.Module, batches: Iterable[Batch], options: CalibrationOptions, copies: int) -> list[float]:
    """The mean loss of each of several copies of the rows, in one forward pass a batch; language models only."""
    taps = Taps({}, frozenset({"cross"}), options)
    device, generator = next(model.parameters()).device, seeded_generator(options.seed)
    totals, num_examples = [0.0] * copies, 0
    with torch.no_grad():
        for batch in batches:
            wide = mapped(batch, lambda tensor: torch.cat([tensor] * copies))
            sent_batch = mapped(wide, lambda tensor: sent(tensor, device))
            for number, own in enumerate(predictions(model, sent_batch, labels_of(wide), taps).parts(copies)):
                totals[number] += float(own.loss(taps.backward_passes[-1].labels, options, generator))
            num_examples += num_examples_of(batch)
    return [total / num_examples for total in totals]
