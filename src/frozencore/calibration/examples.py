"""Calibration data in the usual forms: batches, a data loader, or a dataset of tokenised rows."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from frozencore.calibration.batches import Batch, is_batch, take_examples
from frozencore.calibration.preserve import own_random_state
from frozencore.errors import ConfigError, DataError
from frozencore.words import one_line

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
    return (isinstance(rows, IterableDataset) or hasattr(rows, "column_names")) and not _has_length(rows)


def _has_length(data: Any) -> bool:
    try:
        return len(data) >= 0
    except (TypeError, NotImplementedError):
        return False


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
