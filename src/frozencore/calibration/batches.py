"""Batches of calibration data, dictionaries of tensors with a row per example, and the forms in which users give them:
batches, a data loader, or a dataset of tokenised rows.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from frozencore.calibration.preserve import own_random_state
from frozencore.errors import ConfigError, DataError
from frozencore.words import one_line

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


Collator = Callable[[list[Any]], Batch]
"""Makes a batch of a list of rows: any data collator of transformers or TRL."""

BATCH_SIZE = 8


@dataclass(frozen=True)
class CollatedRows:
    """A dataset's rows as batches, in order; can be read several times."""

    dataset: Iterable[Any] | Dataset[Any]
    collator: Collator
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        rows = iter(self.dataset) if isinstance(self.dataset, Iterable) else self._by_index(self.dataset)
        while chunk := [_without_text(row) for row in itertools.islice(rows, self.batch_size)]:
            yield self._collated(chunk)

    @staticmethod
    def _by_index(dataset: Any) -> Iterator[Any]:
        """Read a PyTorch dataset up to its length: it may not be iterable, and may accept larger indices."""
        return (dataset[index] for index in range(len(dataset)))

    def _collated(self, rows: list[Any]) -> Batch:
        try:
            batch = self.collator(rows)
        except (TypeError, ValueError, KeyError) as error:
            if not isinstance(rows[0], Mapping) or "input_ids" in rows[0]:
                raise
            raise DataError(
                f"calibrate needs tokenised rows, but these have {_keys(rows[0])} and the collator cannot read them "
                f"({one_line(error, 200)}). Tokenise them first, with 'input_ids' and 'labels'."
            ) from error
        return batch


class CachedBatches:
    """Batches that are read once and kept, so that every pass sees the same batches in the same order."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.dataset = getattr(batches, "dataset", None)  # tells the number of examples
        self._batches = batches
        self._coming: Iterator[Batch] | None = None
        self._kept: list[Batch] = []
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[Batch]:
        yield from self._kept
        if self._failure is not None:  # an iterator that has raised looks exhausted, but is not
            raise self._failure
        try:
            self._coming = self._coming or iter(self._batches)
            for batch in self._coming:
                self._kept.append(batch)
                yield batch
        except Exception as error:
            self._failure = error
            raise


def batches_from(
    data: Any,
    *,
    collator: Collator | None = None,
    batch_size: int | None = None,
    num_examples: int | None = None,
    any_form: bool = False,
) -> Iterable[Batch]:
    """Turn the user's calibration data into batches.

    Args:
        data: Batches, or rows if there is a collator: a ``datasets.Dataset``, a PyTorch dataset, a list.
        collator: Makes a batch of rows. Text columns beside ``input_ids`` are removed first.
        batch_size: Rows in a batch; 8 by default.
        num_examples: Read at most this many examples, at once; None reads all.
        any_form: Accept any object that holds rows of tensors as a batch.

    Raises:
        ConfigError: Endless or streamed data without ``num_examples``, or a collator for data that are batches.
        DataError: Rows without a collator, a single batch, or a dictionary of splits.
    """
    if num_examples is None and _may_not_end(data):
        raise ConfigError(
            f"calibrate reads its data to the end, but this {type(data).__name__} has no known end. "
            "Pass num_examples=128, for instance."
        )
    if isinstance(data, Mapping):  # of tensors, or of splits
        what = "a single batch: pass [batch]" if is_batch(data) else "one split, such as data['train']"
        raise DataError(f"calibrate takes batches or a dataset, but a dictionary of {_keys(data)} came. Pass {what}.")
    batches = data if collator is None else _collated(data, collator, BATCH_SIZE if batch_size is None else batch_size)
    if collator is None:
        _refuse_rows(data, batch_size)
    if num_examples is None:
        return batches
    with own_random_state():  # a loader draws its order from the global generator
        return list(take_examples(batches, num_examples, any_form=any_form))


def _collated(data: Any, collator: Collator, batch_size: int) -> CollatedRows:
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1 row, but {batch_size} came.")
    if getattr(data, "collate_fn", None) is not None:
        raise ConfigError("A collator makes batches of rows, but a DataLoader gives batches. Leave the collator out.")
    return CollatedRows(data, collator, batch_size)


def _refuse_rows(data: Any, batch_size: int | None) -> None:
    if batch_size is not None:
        raise ConfigError("batch_size is for rows with a collator; batches have their size. Pass a collator as well.")
    if hasattr(data, "column_names"):  # a Dataset of the library datasets, in memory or streamed
        columns = data.column_names or ()
        text = "" if "input_ids" in columns else " Tokenise its rows first, with 'input_ids' and 'labels'."
        raise DataError(
            f"calibrate needs a collator to make batches of a dataset's rows ({', '.join(map(repr, columns))}). "
            f"Pass collator=DataCollatorForSeq2Seq(tokenizer), for instance.{text}"
        )


def _may_not_end(data: Any) -> bool:
    """Return whether data may be endless: iterators of itertools, and datasets without a length, also in a loader."""
    if isinstance(data, itertools.cycle | itertools.count | itertools.repeat):
        return operator.length_hint(data, -1) < 0
    rows = getattr(data, "dataset", data)
    if not isinstance(rows, IterableDataset) and not hasattr(rows, "column_names"):
        return False
    try:
        return len(rows) < 0
    except (TypeError, NotImplementedError):
        return True


def _without_text(row: Any) -> Any:
    """Drop a tokenised row's text columns, as Trainer does: no collator can stack them."""
    if not isinstance(row, Mapping) or "input_ids" not in row:
        return row
    return {key: value for key, value in row.items() if not _is_text(value)}


def _is_text(value: Any) -> bool:
    if isinstance(value, list) and value:
        return _is_text(value[0])
    return value is None or isinstance(value, str | bytes | Mapping)


def _keys(row: Mapping[Any, Any]) -> str:
    return ", ".join(repr(key) for key in row)
