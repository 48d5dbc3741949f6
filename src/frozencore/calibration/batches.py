"""Batches of calibration data, dictionaries of tensors with a row per example: the forms in which users give them, and
the tokens in them that count.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, IterableDataset

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.preserve import own_random_state
from frozencore.device import sent
from frozencore.errors import CalibrationError, ConfigError, DataError
from frozencore.text import one_line

IGNORED = -100  # the label of a token without loss, as in transformers
BATCH_SIZE = 8

Batch = Any
"""A dictionary of tensors with one row per example; with a loss of the user's own, any object that holds tensors."""
Collator = Callable[[list[Any]], Batch]
"""Makes a batch of a list of rows: any data collator of transformers or TRL."""


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
    """Raise a ``DataError`` if this is not a batch, or, in ``any_form``, no object that holds rows of tensors."""
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


def batches_from(
    data: Any,
    *,
    collator: Collator | None = None,
    batch_size: int | None = None,
    num_examples: int | None = None,
    any_form: bool = False,
) -> list[Batch]:
    """Read the user's calibration data as batches, once, so that every pass sees the same batches in the same order.

    Args:
        data: Batches, or rows if there is a collator: a ``datasets.Dataset``, a PyTorch dataset, a list.
        collator: Makes a batch of rows. Text columns beside ``input_ids`` are removed first.
        batch_size: Rows in a batch; 8 by default.
        num_examples: Read at most this many examples; None reads all.
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
    if collator is None:
        _refuse_rows(data, batch_size)
        batches = data
    elif batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1 row, but {batch_size} came.")
    elif getattr(data, "collate_fn", None) is not None:
        raise ConfigError("A collator makes batches of rows, but a DataLoader gives batches. Leave the collator out.")
    else:
        batches = _collated(data, collator, BATCH_SIZE if batch_size is None else batch_size)
    with own_random_state():  # a loader draws its order from the global generator
        return list(take_examples(batches, num_examples, any_form=any_form))


def take_examples(batches: Iterable[Batch], num_examples: int | None, *, any_form: bool = False) -> Iterable[Batch]:
    """Yield batches until ``num_examples`` are reached; the last batch is cut. None yields all.

    A batch is whole if one of its tensors has another number of rows (patches of images): which to cut is unknown.
    """
    if num_examples is not None and num_examples < 1:
        raise ConfigError(f"The number of calibration examples must be at least 1, but {num_examples} came.")
    left = num_examples
    for index, batch in enumerate(batches):
        require_batch(batch, index, any_form=any_form)
        rows = num_examples_of(batch)
        if left is None or left >= rows or any(len(tensor) != rows for tensor in tensors_of(batch) if tensor.ndim):
            yield batch
        else:
            yield mapped(batch, partial(_first, left))
        if left is not None and (left := left - rows) <= 0:  # stop before the loader makes a batch that is not needed
            return


def _first(count: int, tensor: Tensor) -> Tensor:
    return tensor[:count] if tensor.ndim else tensor


def _collated(data: Iterable[Any] | Dataset[Any], collator: Collator, batch_size: int) -> Iterator[Batch]:
    """Make batches of a dataset's rows, in order."""
    # a PyTorch dataset may not be iterable, and may accept indices beyond its length
    sized: Any = data
    rows = iter(data) if isinstance(data, Iterable) else (sized[index] for index in range(len(sized)))
    while chunk := [_without_text(row) for row in itertools.islice(rows, batch_size)]:
        try:
            yield collator(chunk)
        except (TypeError, ValueError, KeyError) as error:
            if not isinstance(chunk[0], Mapping) or "input_ids" in chunk[0]:
                raise
            raise DataError(
                f"calibrate needs tokenised rows, but these have {_keys(chunk[0])} and the collator cannot read them "
                f"({one_line(error, 200)}). Tokenise them first, with 'input_ids' and 'labels'."
            ) from error


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


def labels_of(batch: Mapping[str, Any]) -> Tensor:
    """The labels of a batch.

    Raises:
        CalibrationError: The batch has no labels.
    """
    if batch.get("labels") is None:
        raise CalibrationError(
            "Calibration needs labels for its loss and its completion tokens, but a batch has the keys "
            f"{', '.join(sorted(batch))}. Add 'labels' (-100 on tokens without loss)."
        )
    return batch["labels"]


def predicted(labels: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The label that position t predicts: the next token's. The last position predicts none."""
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class CountedTokens:
    """The tokens that count in a batch.

    Attributes:
        shape: b and t: examples, and tokens of an example, padding included; zeros if the batch does not say them.
        rows: The indices of the counted tokens in the b·t tokens, examples first; None means all.
        or_all: Count all rows in a layer with another number of rows.
    """

    shape: tuple[int, int] = (0, 0)
    rows: Tensor | None = None
    or_all: bool = False

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1]

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "b t"], *, device: torch.device | None = None) -> CountedTokens:
        """The tokens where a mask is true, for use on ``device``; a mask on the CPU avoids synchronising the device."""
        flat = mask.flatten()
        rows = None if bool(flat.all()) else sent(flat.nonzero().squeeze(1), device)
        b, t = mask.shape
        return cls(shape=(b, t), rows=rows)

    @classmethod
    def of_call(cls, mask: Any, *, device: torch.device | None = None) -> CountedTokens:
        """The tokens of one call, from its mask if it has one; all rows in layers with another number."""
        if not isinstance(mask, Tensor) or mask.ndim < 2:
            return cls(or_all=True)
        return replace(cls.from_mask(shown_tokens(mask), device=device), or_all=True)


def shown_tokens(mask: Tensor) -> Bool[Tensor, "b t"]:
    """The tokens that an attention mask shows (b x t).

    In a mask of packed rows (b x heads x t x t, boolean, or additive: 0 shows) they are those that see themselves.
    """
    if mask.ndim == 2:
        return mask.bool()
    own = mask.diagonal(dim1=-2, dim2=-1)
    seen = own >= 0 if own.is_floating_point() else own.bool()
    return seen.any(1) if seen.ndim == 3 else seen


def text_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b t"]:
    """The tokens of a batch that are not padding, without the skipped first ones; the encoder's if there is one."""
    ids = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"][..., 0]
    return _text(ids, batch.get("attention_mask"), options)


def counted_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b t"]:
    """The tokens of a batch whose x and δ enter the moments."""
    counted = text_tokens(batch, options)
    if options.tokens == "completion":
        counted = counted & predicted(labels_of(batch)).ne(IGNORED)
    return counted


def counted_target_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b t"]:
    """The decoder's tokens of a batch: by its mask if there is one, else the tokens that predict a label.

    A classifier has no label for each token. Its tokens are those of ``decoder_input_ids``, or else the source's.
    """
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if labels is None or labels.ndim < 2:
        ids = batch.get("decoder_input_ids")
        return text_tokens(batch, options) if ids is None else _text(ids, mask, options)
    predicts = labels.ne(IGNORED)
    counted = _text(labels, predicts if mask is None else mask, options)
    return counted & predicts if options.tokens == "completion" else counted


def _text(ids: Tensor, mask: Tensor | None, options: CalibrationOptions) -> Tensor:
    text = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device) if mask is None else shown_tokens(mask)
    return text & (text.cumsum(1) > options.skip_first) if options.skip_first else text
