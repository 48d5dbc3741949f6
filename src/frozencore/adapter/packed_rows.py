"""Rows that are packed end to end into a sequence, and models that keep them apart."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from frozencore.calibration.preserve import preserved

_NEAR = 0.02  # relative to the largest logit: rounding differs by less, wrong positions by more


def keeps_rows_apart(model: nn.Module) -> bool:
    """Return whether a causal model computes rows joined end to end as if each came alone.

    The logits of a short row are compared after two other rows, after one, and alone.
    """
    one, another, last = ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [7, 6, 5, 4, 3, 2, 1])
    device = next(model.parameters()).device

    def logits(*rows: list[int]) -> Tensor:
        ids, places = ([list(chain.from_iterable(part))] for part in (rows, [range(len(row)) for row in rows]))
        inputs = {"input_ids": torch.tensor(ids, device=device), "position_ids": torch.tensor(places, device=device)}
        return model(**inputs, use_cache=False).logits[0, -len(last) :].float()

    with preserved(model), torch.no_grad():
        after_one, after_another, alone = logits(one, last), logits(another, last), logits(last)
    largest = float(alone.abs().max())
    same = torch.allclose(after_one, after_another, rtol=0.0, atol=1e-6 * largest)
    return same and float((after_one - alone).abs().max()) <= _NEAR * largest
