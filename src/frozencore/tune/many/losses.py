"""Compute the loss of each row of a mixed batch, with logits only at completion tokens.

The rows of many tenants have completions at different positions, and ``logits_to_keep`` keeps whole columns. With a
large vocabulary the unneeded logits would cost more than the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.calibration.batches import rope_limit
from frozencore.calibration.counted_tokens import IGNORED
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, score_in_groups
from frozencore.tune.scoring.forward import base_of, forward_accepts, scoring_mode, vocabulary_of
from frozencore.words import Progress


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
    if head is None or isinstance(head, FrozenCoreLayer) or not forward_accepts(model, "logits_to_keep"):
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
            lengths=[len(row.input_ids) for row in rows],
            limit=rope_limit(model),
            tokens_per_batch=tokens_per_batch,
            progress=progress,
        )
    counts = [sum(row.num_targets for row in rows) for rows in sets]
    return [total / count if count else math.nan for total, count in zip(totals, counts, strict=True)]


def row_sizes(model: nn.Module, rows: Sequence[TokenRow]) -> list[tuple[int, int]]:
    """Tokens and logits of each row, for :func:`frozencore.tune.rows.token_batches.row_costs`."""
    vocabulary = vocabulary_of(model)
    return [(len(row.input_ids), row.num_targets * vocabulary) for row in rows]
