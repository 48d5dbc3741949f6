"""Batches of calibration data: dictionaries of tensors with a row per example."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from frozencore.errors import ConfigError, DataError

Batch = Any
"""A dictionary of tensors with one row per example; with a loss of the user's own, any object that holds tensors."""


def is_batch(data: Any) -> bool:
    """Return whether this is a dictionary that holds rows of tensors."""
    holds = isinstance(data, Mapping) and any(isinstance(value, Tensor) and value.ndim for value in data.values())
    return holds and num_examples_of(data) > 0 and getattr(data.get("input_ids"), "ndim", 2) > 1


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in nested dictionaries and lists too."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy a batch into plain dictionaries and lists, with ``change`` applied to each tensor."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [mapped(value, change) for value in batch]
        return parts if isinstance(batch, list) else tuple(parts)
    return batch


def require_batch(batch: Any, index: int, *, any_form: bool = False) -> None:
    """Refuse data that are not a batch.

    Args:
        any_form: Accept any object that holds rows of tensors.

    Raises:
        DataError: ``batch`` is not a batch; ``index`` is its number in the message.
    """
    if num_examples_of(batch) == 0 if any_form else not is_batch(batch):
        what = type(batch).__name__
        if isinstance(batch, Mapping):
            what = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in batch.items())
        raise DataError(
            f"Calibration takes batches, dictionaries of tensors with one row per example, but number {index} is "
            f"{what}. Give a DataLoader, or rows with a collator."
        )


def num_examples_of(batch: Any) -> int:
    """The number of rows of a batch's tokens, or of its first tensor if it is no dictionary with tokens."""
    if isinstance(batch, Mapping):
        for name in ("input_ids", "attention_mask", "labels"):  # the first tensor may hold patches of all images
            if isinstance(tensor := batch.get(name), Tensor) and tensor.ndim:
                return tensor.shape[0]
    return next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim), 0)


def total_examples(batches: Iterable[Batch], *, any_form: bool = False) -> int | None:
    """The number of rows of all batches; None if it is unknown before the batches are read."""
    if isinstance(batches, Sequence):
        for index, batch in enumerate(batches):  # checks all batches before the first one runs
            require_batch(batch, index, any_form=any_form)
        return sum(num_examples_of(batch) for batch in batches)
    dataset = getattr(batches, "dataset", None)
    try:
        return len(dataset) if dataset is not None else None
    except TypeError:
        return None


def take_examples(batches: Iterable[Batch], num_examples: int, *, any_form: bool = False) -> Iterable[Batch]:
    """Yield batches until ``num_examples`` are reached; the last batch is cut.

    A batch is whole if one of its tensors has another number of rows (patches of images): which to cut is unknown.
    """
    if num_examples < 1:
        raise ConfigError(f"The number of calibration examples must be at least 1, but {num_examples} came.")
    left = num_examples
    for index, batch in enumerate(batches):
        require_batch(batch, index, any_form=any_form)
        rows = num_examples_of(batch)
        can_be_cut = all(len(tensor) == rows for tensor in tensors_of(batch) if tensor.ndim)
        yield mapped(batch, partial(_first, left if can_be_cut else None))
        left -= rows
        if left <= 0:  # stop before the loader makes a batch that is not needed
            return


def rope_limit(model: Any) -> int | None:
    """The length beyond which LongRoPE uses other frequencies; None for a model without it.

    transformers chooses the frequencies of all rows of a batch by its longest row. So rows on the two sides of the
    limit must not share a batch.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    config: Any = getattr(base, "config", None)
    rope = getattr(config.get_text_config(), "rope_parameters", None) if hasattr(config, "get_text_config") else None
    of_layers = [rope, *rope.values()] if isinstance(rope, Mapping) else []
    limits = [
        one["original_max_position_embeddings"]
        for one in of_layers
        if isinstance(one, Mapping) and one.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def on_one_side(groups: Iterable[Iterable[int]], lengths: Sequence[int], limit: int | None) -> list[list[int]]:
    """Split groups of row indices so that no group has rows on both sides of a limit."""
    found: list[list[int]] = []
    for group in groups:
        sides: dict[bool, list[int]] = {}
        for index in group:
            sides.setdefault(limit is not None and lengths[index] > limit, []).append(index)
        found += sides.values()
    return found


def on_each_side(batch: Batch, limit: int | None) -> list[Batch]:
    """Split a batch whose rows lie on both sides of the limit of LongRoPE, and cut the padding of each part."""
    mask = batch.get("attention_mask") if limit is not None and isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or "position_ids" in batch or mask.shape[1] <= (limit or 0):
        return [batch]
    parts = []
    for rows in on_one_side([range(len(mask))], mask.sum(1).tolist(), limit):
        (columns,) = mask[rows].any(0).nonzero(as_tuple=True)
        cut = slice(int(columns.min()), int(columns.max()) + 1) if len(columns) else slice(None)
        parts.append(mapped(batch, partial(_part, rows, cut, mask.shape)))
    return parts


def _part(rows: list[int], columns: slice, shape: torch.Size, tensor: Tensor) -> Tensor:
    if tensor.shape[:2] == shape:
        return tensor[rows][:, columns]
    return tensor[rows] if tensor.ndim and len(tensor) == shape[0] else tensor


def _first(count: int | None, tensor: Tensor) -> Tensor:
    return tensor[:count] if tensor.ndim else tensor
