"""Batches without padding: rows laid end to end in one, whose positions begin anew at each of them.

From such positions, and no attention mask, transformers builds a mask that keeps the rows apart, or tells kernels of
variable length where they end. The loss is that of the padded batch, over the same tokens. With a dense mask
attention takes the square of the whole batch's length, so this pays where the kernels know the rows' lengths
(docs/cost.md, "Padding").
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.calibration.counted import IGNORED
from frozencore.errors import ConfigError
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.batches import labels_of
from frozencore.tune.scoring.forward import forward_accepts, num_virtual_tokens, scoring_mode

NEAR = 0.02  # of the largest logit: kernels for other lengths round otherwise; positions that run on differ by more


def lay_end_to_end(rows: Sequence[TokenRow]) -> dict[str, Any]:
    """``input_ids``, ``position_ids`` and ``labels``, each (1, tokens of all rows), and no cache, with which
    transformers would not look at the positions.

    Labels are -100 on prompts and on each row's first token, which nothing before it foretells.
    """
    labels = ([IGNORED, *labels_of(row)[1:]] for row in rows)
    return {
        "input_ids": torch.tensor([list(chain.from_iterable(row.input_ids for row in rows))]),
        "position_ids": torch.tensor([list(chain.from_iterable(range(len(row.input_ids)) for row in rows))]),
        "labels": torch.tensor([list(chain.from_iterable(labels))]),
        "use_cache": False,
    }


def require_rows_apart(model: nn.Module) -> None:
    """Look whether rows laid end to end are to the model as if each came alone.

    Raises:
        ConfigError: They are not.
    """
    knows = forward_accepts(model, "position_ids", "use_cache") and not num_virtual_tokens(model)
    if not knows or not _keeps_apart(model):
        raise ConfigError(
            "padding_free takes a model that keeps rows apart by their position_ids, but this one lets them see one "
            "another, or counts positions by itself. Leave --padding-free out."
        )


def _keeps_apart(model: nn.Module) -> bool:
    """By the logits of a short row: after another, after a third, and alone."""
    one, another, last = ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [7, 6, 5, 4, 3, 2, 1])

    def logits(*rows: list[int]) -> Tensor:
        batch = lay_end_to_end([TokenRow("", ids, 0) for ids in rows])
        device, _ = next(model.parameters()).device, batch.pop("labels")
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        return model(**inputs).logits[0, -len(last) :].float()

    with scoring_mode(model):
        after_one, after_another, alone = logits(one, last), logits(another, last), logits(last)
    same = torch.allclose(after_one, after_another, rtol=0.0, atol=1e-6 * float(alone.abs().max()))
    return same and float((after_one - alone).abs().max()) <= NEAR * float(alone.abs().max())
