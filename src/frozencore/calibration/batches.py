"""Batches of calibration data: dictionaries of tensors with a row per example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from frozencore.errors import ConfigError, DataError

Batch = Mapping[str, Any]


def is_batch(data: Any) -> bool:
    """Whether this is a dictionary that holds rows of tensors."""
    return isinstance(data, Mapping) and num_examples_of(data) > 0 and getattr(data.get("input_ids"), "ndim", 2) > 1


def require_batch(batch: Any, index: int) -> None:
    """Refuse what is no batch.

    Raises:
        DataError: It is none; ``index`` says which.
    """
    if not is_batch(batch):
        what = type(batch).__name__
        if isinstance(batch, Mapping):
            what = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in batch.items())
        raise DataError(
            f"Calibration takes batches, dictionaries of tensors with one row per example, but number {index} is "
            f"{what}. Give a DataLoader, or rows with a collator."
        )


def num_examples_of(batch: Batch) -> int:
    """Rows of a batch."""
    return next((value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim), 0)


def total_examples(batches: Iterable[Batch]) -> int | None:
    """Rows of all batches; None where that is not known before they are read."""
    if isinstance(batches, Sequence):
        for index, batch in enumerate(batches):  # all of them before the first one runs
            require_batch(batch, index)
        return sum(num_examples_of(batch) for batch in batches)
    dataset = getattr(batches, "dataset", None)
    try:
        return len(dataset) if dataset is not None else None
    except TypeError:
        return None


def take_examples(batches: Iterable[Batch], num_examples: int) -> Iterable[Batch]:
    """Batches up to that many examples; the last one is cut."""
    if num_examples < 1:
        raise ConfigError(f"The number of calibration examples must be at least 1, but {num_examples} came.")
    left = num_examples
    for index, batch in enumerate(batches):
        require_batch(batch, index)
        yield {key: value[:left] if isinstance(value, Tensor) and value.ndim else value for key, value in batch.items()}
        left -= num_examples_of(batch)
        if left <= 0:  # before the loader is asked for a batch that nobody needs
            return
