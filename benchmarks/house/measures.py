"""What is measured as the model learns: loss on held-out text, and how uneven the channels of each product are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from frozencore import collect_moments
from frozencore.calibration.options import CalibrationOptions
from frozencore.maths.moments import spread
from packed_text import in_rows


@contextmanager
def mixed(device: torch.device) -> Iterator[None]:
    """Products in bfloat16 on CUDA, all in float32 elsewhere."""
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        yield


def held_out_rows(tokens: NDArray[np.uint16], num_rows: int, length: int) -> Tensor:
    """That many rows, spread evenly over the held-out text, or all that it has."""
    starts = np.arange(len(tokens) // length) * length
    if not len(starts):
        raise SystemExit(f"The held-out text has {len(tokens)} tokens, fewer than one row of {length}.")
    chosen = np.linspace(0, len(starts) - 1, min(num_rows, len(starts))).astype(np.int64)
    return in_rows(tokens, starts[chosen], length)


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, held_out: Tensor, *, at_once: int) -> float:
    """Mean over predicted tokens, nats."""
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for ids in held_out.split(at_once):
        ids = ids.to(model.device)
        with mixed(model.device):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        total += cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return float(total) / held_out[:, 1:].numel()


def channel_spread(model: PreTrainedModel, held_out: Tensor) -> dict[str, dict[str, float]]:
    """Max / median of the second moments of every product's inputs and output errors, on up to 32 rows."""
    products = {name: part for name, part in model.base_model.named_modules() if isinstance(part, nn.Linear)}
    batches = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        for ids in held_out[:: max(1, len(held_out) // 32)][:32].to(model.device).split(8)
    ]
    moments = collect_moments(
        model,
        batches,
        products,
        needs=frozenset({"input_square", "error_square"}),
        options=CalibrationOptions(weighting="token_sum"),
    )
    return {
        name: {"inputs": round(spread(layer.a), 3), "errors": round(spread(layer.d), 3)}
        for name, layer in moments.items()
    }
