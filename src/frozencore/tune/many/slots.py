"""Cores that train together, with AdamW over all of them at once.

    m ← β₁ m + (1 - β₁) g,    v ← β₂ v + (1 - β₂) g²,    R ← (1 - η λ) R - η m̂ / (√v̂ + ε)

η, λ, the step count and the clipping factor are one number a slot.

The rows of a mixed batch have completions at different positions, so the loss of each row is computed with logits only
at completion tokens. With a large vocabulary the other logits would cost more than the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from frozencore.adapter.bank import CoreStack
from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.adapter.saved.tensors import by_layer
from frozencore.calibration.batches import IGNORED
from frozencore.errors import ConfigError
from frozencore.text import Progress
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, score_in_groups
from frozencore.tune.scoring.forward import base_of, forward_accepts, scoring_mode, vocabulary_of
from frozencore.tune.training.callbacks import total_bytes


def row_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The sum of nats over each row's completion tokens, (rows,).

    A causal model gets no padding mask, because padding is on the right, where no token of a row sees it.

    Args:
        batch: ``input_ids``, ``attention_mask`` and ``labels``, each (rows, tokens), padded on the right.
    """
    inputs = {"input_ids": batch["input_ids"]}
    if not _is_causal(model):
        inputs["attention_mask"] = batch["attention_mask"]
    targets = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    wanted = targets != IGNORED
    with _logits_at(model, wanted) as are_narrowed:
        logits = model(**inputs).logits
    logits = logits.flatten(0, 1) if are_narrowed else logits[wanted]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = cross_entropy(logits, targets[wanted].to(logits.device), reduction="none")
    row_of = wanted.nonzero()[:, 0].to(nats.device)
    return nats.new_zeros(len(targets)).index_add(0, row_of, nats)


def _is_causal(model: nn.Module) -> bool:
    """Return whether every attention layer is marked as causal."""
    said = [module.__dict__["is_causal"] for module in model.modules() if "is_causal" in module.__dict__]
    return bool(said) and all(said)


@contextmanager
def _logits_at(model: nn.Module, wanted: Tensor) -> Iterator[bool]:
    """Let the output layer see only the wanted positions, as one row; False if that is impossible."""
    head: Any = base_of(model).get_output_embeddings()
    if head is None or isinstance(head, FrozenCoreLinear) or not forward_accepts(model, "logits_to_keep"):
        yield False  # the output layer has row cores, or the model reads logits in another way
        return
    handle = head.register_forward_pre_hook(lambda _, args: (args[0][wanted].unsqueeze(0), *args[1:]))
    try:
        yield True
    finally:
        handle.remove()


def held_out_losses(
    model: nn.Module,
    sets: Sequence[Sequence[TokenRow]],
    *,
    pad_id: int,
    through: Callable[[list[int]], AbstractContextManager[None]] = lambda _: nullcontext(),
    tokens_per_batch: int | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """Nats per completion token of each set of rows, with sets mixed in batches; NaN for a set without such tokens.

    Args:
        through: Called with the set index of each row of a batch. The batch runs inside the context that it returns.
    """
    rows = [row for rows in sets for row in rows]
    set_of = [i for i, rows in enumerate(sets) for _ in rows]
    device, collate, totals = next(model.parameters()).device, PaddingCollator(pad_id), [0.0] * len(sets)

    def score(group: list[int]) -> None:
        batch = {name: tensor.to(device) for name, tensor in collate([rows[i] for i in group]).items()}
        with through([set_of[i] for i in group]):
            nats = row_losses(model, batch).tolist()
        for i, loss in zip(group, nats, strict=True):
            totals[set_of[i]] += loss

    with scoring_mode(model):
        score_in_groups(
            score,
            row_sizes(model, rows),
            device,
            tokens_per_batch=tokens_per_batch,
            progress=progress,
        )
    counts = [sum(row.num_targets for row in rows) for rows in sets]
    return [total / count if count else math.nan for total, count in zip(totals, counts, strict=True)]


def row_sizes(model: nn.Module, rows: Sequence[TokenRow]) -> list[tuple[int, int]]:
    """Tokens and logits of each row, for :func:`frozencore.tune.rows.token_batches.row_costs`."""
    vocabulary = vocabulary_of(model)
    return [(len(row.input_ids), row.num_targets * vocabulary) for row in rows]


BETAS, EPSILON = (0.9, 0.999), 1e-8  # as the Trainer's
CLIP_EPSILON = 1e-6  # as torch's clip_grad_norm_


class TrainedSlots(CoreStack):
    """A :class:`CoreStack` with gradients and moments; the used slots come first.

    Raises:
        ConfigError: Also if the adapter's cores are not float32 on one device.
    """

    def __init__(self, model: nn.Module, num_slots: int, *, adapter_name: str = "default") -> None:
        super().__init__(model, num_slots, adapter_name=adapter_name)
        own = [layer.core(adapter_name).detach() for layer in self.layers.values()]
        kinds = sorted({f"{R.dtype} on {R.device}" for R in own})
        if len(kinds) > 1 or not kinds[0].startswith("torch.float32 "):
            raise ConfigError(
                f"Cores that train together are float32 and on one device, but these are {' and '.join(kinds)}."
            )
        self.start = torch.cat([R.flatten() for R in own])
        ((self.device, self.values),) = self.blocks.items()
        self.gradients, self.first, self.second = (torch.zeros_like(self.values) for _ in range(3))

    def __len__(self) -> int:
        return len(self.values)

    def by_layer(self, flat: Tensor) -> dict[str, Tensor]:
        """Views (..., r, r) of contiguous values (..., Σr²)."""
        return by_layer(flat, self.ranks)

    @property
    def state_held_bytes(self) -> int:
        """The training state of one slot: its gradient and moments."""
        return total_bytes((self.gradients, self.first, self.second)) // len(self)

    def clear(self, slot: int) -> None:
        """Reset a slot for a new tenant: the adapter's own core, zero moments."""
        for state in (self.gradients, self.first, self.second):
            state[slot].zero_()
        self.values[slot] = self.start

    def move(self, source: int, target: int) -> None:
        """Move a tenant to another slot, between two steps."""
        for state in (self.values, self.first, self.second):
            state[target] = state[source]

    def row_gradients(self, slots: Sequence[int], losses: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the loss of each row (rows) and its own gradient (rows x Σr²); each row uses a copy of its core.

        Args:
            slots: The slot of each row.
            losses: Runs the model on the batch.
        """
        places = torch.tensor(slots, device=self.device)
        copies = {name: core[places].requires_grad_() for name, core in self.cores.items()}
        with self.through(copies):
            found = losses()
            gradients = torch.autograd.grad(found.sum(), list(copies.values()), materialize_grads=True)
        return found.detach(), torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)

    def gradient_norms(self, num_used: int) -> Tensor:
        """The norm of each slot's gradient over all layers."""
        return torch.linalg.vector_norm(self.gradients[:num_used], dim=1)

    def step(
        self,
        norms: Tensor,
        *,
        rates: Sequence[float],
        counts: Sequence[int],
        largest_norms: Sequence[float],
        decays: Sequence[float],
    ) -> None:
        """Make one step on the first slots, and zero their gradients. Each argument has one number a slot.

        Args:
            norms: Norms of the gradients.
            rates: η.
            counts: Number of steps, including this one.
            largest_norms: The norm to which the gradient is clipped.
            decays: λ.
        """
        used = len(norms)
        values, g, m, v = (state[:used] for state in (self.values, self.gradients, self.first, self.second))
        (beta1, beta2), column = BETAS, self._column
        g.mul_((column(largest_norms) / (norms.unsqueeze(1) + CLIP_EPSILON)).clamp_(max=1.0))
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if any(decays):
            values.mul_(column([1 - rate * decay for rate, decay in zip(rates, decays, strict=True)]))
        torch.sqrt(v, out=g)  # reuses the gradient's memory
        g.div_(column([(1 - beta2**count) ** 0.5 for count in counts])).add_(EPSILON)
        torch.div(m, g, out=g)
        g.mul_(column([rate / (1 - beta1**count) for rate, count in zip(rates, counts, strict=True)]))
        values.sub_(g)
        g.zero_()

    def _column(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, device=self.device).unsqueeze(1)
