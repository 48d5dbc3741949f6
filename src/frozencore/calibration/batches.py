"""Batches of calibration data, dictionaries of tensors with a row per example: the forms in which users give them, and
the tokens in them that count.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, IterableDataset

from frozencore.calibration.calibration_options import BATCH_SIZE, CalibrationOptions
from frozencore.calibration.preserve import own_random_state
from frozencore.device import to_device
from frozencore.errors import CalibrationError, ConfigError, DataError

IGNORED = -100  # the label of a token without loss, as in transformers

Batch = Any
"""A dictionary of tensors with one row per example; with a ``loss_fn``, any object with tensors in it."""
Collator = Callable[[list[Any]], Batch]
"""Makes a batch of a list of rows: any data collator of transformers or TRL."""


def is_batch(data: Any) -> bool:
    """Return whether this is a dictionary with rows of tensors."""
    has_tensors = isinstance(data, Mapping) and any(isinstance(value, Tensor) and value.ndim for value in data.values())
    return has_tensors and num_examples_of(data) > 0 and getattr(data.get("input_ids"), "ndim", 2) > 1


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


def require_batch(batch: Any, index: int, *, any_form: bool) -> None:
    """Raise a ``DataError`` if this is not a batch, or, in ``any_form``, no object with rows of tensors in it."""
    if num_examples_of(batch) == 0 if any_form else not is_batch(batch):
        what = type(batch).__name__
        if isinstance(batch, Mapping):
            what = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in batch.items())
        elif isinstance(batch, list) and batch and isinstance(batch[0], Mapping):
            what = f"a list of rows ({', '.join(map(repr, batch[0]))})"  # as the loaders of GRPO give
        raise DataError(
            f"Calibration takes batches, dictionaries of tensors with one row per example, but number {index} is "
            f"{what}. Give a list of batches or a DataLoader, or tokenised rows with a collator such as "
            "DataCollatorForSeq2Seq(tokenizer)."
        )


def num_examples_of(batch: Any) -> int:
    """The number of examples of a batch: rows of its tokens, unless rows are packed; else rows of its first tensor."""
    if isinstance(batch, Mapping):
        if (begins := begins_of(batch)) is not None:
            return int(begins.sum())
        for name in ("input_ids", "attention_mask", "labels"):  # the first tensor may be patches of all images
            if isinstance(tensor := batch.get(name), Tensor) and tensor.ndim:
                return tensor.shape[0]
    return next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim), 0)


_ENDS, _LONGEST = "cu_seq_lens", "max_length"  # the names of the ends and lengths of packed examples begin so


def begins_of(batch: Mapping[str, Any]) -> Bool[Tensor, "b t"] | None:
    """The tokens that begin an example, in a batch of packed rows; None if each row is one example.

    Examples begin where ``position_ids`` start again, where ``seq_idx`` changes, or at ``cu_seq_lens_q``: what the
    collators of TRL and transformers give.
    """
    if (text := _not_padding(batch)) is None:
        return None
    positions, owners, ends = (batch.get(name) for name in ("position_ids", "seq_idx", "cu_seq_lens_q"))
    if isinstance(positions, Tensor) and positions.shape[1:] == text.shape[1:]:
        begins = positions.diff(prepend=positions[:, :1] - 1).le(0)
    elif isinstance(owners, Tensor) and owners.shape == text.shape:
        begins = owners.diff(prepend=owners[:, :1]).ne(0)
    elif isinstance(ends, Tensor) and len(text) == 1:
        begins = torch.zeros_like(text)
        begins[0, ends[:-1].long()] = True
    else:
        return None
    begins = text & (begins | text.cumsum(1).eq(1))
    return begins if bool((begins.sum(1) > 1).any()) else None


def _not_padding(batch: Mapping[str, Any]) -> Bool[Tensor, "b t"] | None:
    """The tokens that are not padding; None for a batch without tokens."""
    ids, mask, positions = batch.get("input_ids"), batch.get("attention_mask"), batch.get("position_ids")
    ids = batch.get("inputs_embeds") if ids is None else ids
    if not isinstance(ids, Tensor) or ids.ndim < 2:
        return None
    if isinstance(mask, Tensor) and mask.ndim > 1:
        return shown_tokens(mask)
    text = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
    if isinstance(positions, Tensor) and positions.shape == text.shape:  # pad_to_multiple_of pads them with 0
        text = positions.ne(0).flip(1).cummax(1).values.flip(1)
        text[:, 0] = True
    return text


def total_examples(batches: Iterable[Batch], *, any_form: bool) -> int | None:
    """The number of examples of all batches; None if it is unknown before the batches are read."""
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
        any_form: Accept any object with rows of tensors in it as a batch.

    Raises:
        ConfigError: Endless or streamed data without ``num_examples``, or a collator for data that are batches.
        DataError: A dictionary, rows without a collator, or other data that are not batches.
    """
    if num_examples is None and _may_not_end(data):
        raise ConfigError(
            f"calibrate reads its data to the end, but this {type(data).__name__} has no known end. "
            "Pass num_examples=128, for instance."
        )
    if isinstance(data, Mapping):  # its items are names of tensors, or of splits
        raise DataError(
            f"calibrate takes a list of batches or a dataset, but a dictionary of {', '.join(map(repr, data))} was "
            "given. Pass [batch], or one split, such as data['train']."
        )
    if collator is None:
        if batch_size is not None:
            raise ConfigError(
                "batch_size is for rows with a collator; batches have their size. Pass a collator as well."
            )
        batches = data
    elif getattr(data, "collate_fn", None) is not None:
        raise ConfigError("A collator makes batches of rows, but a DataLoader gives batches. Leave the collator out.")
    else:
        batches = _collated(data, collator, BATCH_SIZE if batch_size is None else batch_size)
    here = partial(to_device, device=torch.device("cpu"))  # each look at tokens on a GPU would wait for it
    with own_random_state():  # a loader draws its order from the global generator
        on_host = (mapped(batch, here) for batch in batches)
        return list(take_examples(on_host, num_examples, any_form=any_form))


def take_examples(batches: Iterable[Batch], num_examples: int | None, *, any_form: bool = False) -> Iterable[Batch]:
    """Yield batches until ``num_examples`` are reached; the last batch is cut, packed rows too. None yields all.

    A batch stays whole if it may have ``any_form``, because a user's loss may compare its rows, as DPO's does; and if
    one of its tensors has another number of rows (patches of images): which to cut is unknown.
    """
    if num_examples is not None and num_examples < 1:
        raise ConfigError(f"The number of calibration examples must be at least 1, but {num_examples} was given.")
    left = num_examples
    for index, batch in enumerate(batches):
        require_batch(batch, index, any_form=any_form)
        count = num_examples_of(batch)
        yield from [batch] if left is None or left >= count or any_form else _first_examples(batch, left)
        if left is not None and (left := left - count) <= 0:  # stop before the loader makes a batch that is not needed
            return


def _first_examples(batch: Batch, count: int) -> Iterable[Batch]:
    """Cut a batch after this number of examples; packed rows into whole rows and the first examples of the next row."""
    if not can_split(batch):
        return [batch]
    begins = begins_of(batch) if isinstance(batch, Mapping) else None
    if begins is None:
        return [mapped(batch, lambda tensor: tensor[:count] if tensor.ndim else tensor)]
    t, parts = begins.shape[1], []
    whole, length = divmod(int(begins.flatten().nonzero()[count]), t)
    if whole:
        parts.append(mapped(batch, lambda tensor: tensor[:whole] if tensor.ndim else tensor))
    if begins[whole, :length].any():
        cut = {key: _tokens_of_row(X, whole, slice(length), t) for key, X in batch.items()}
        parts.append(cut | {key: X[: count + 1] for key, X in batch.items() if key.startswith(_ENDS)})
    return parts


def can_split(batch: Batch) -> bool:
    """Return whether each tensor of a batch has the batch's rows, so that examples can be taken out of it.

    A tensor of image patches has another number of rows; positions on several axes (axes, rows, tokens) have theirs on
    another axis.
    """
    if isinstance(batch, Mapping) and getattr(batch.get("position_ids"), "ndim", 2) == 3:
        return False
    begins = begins_of(batch) if isinstance(batch, Mapping) else None
    rows = num_examples_of(batch) if begins is None else len(begins)
    ends = () if begins is None else [value for key, value in batch.items() if key.startswith(_ENDS)]
    return all(len(X) == rows for X in tensors_of(batch) if X.ndim and not any(X is end for end in ends))


def example_at(batch: Batch, number: int) -> Batch:
    """One example of a batch that can be split, alone in its row, also if it was packed."""
    begins = begins_of(batch) if isinstance(batch, Mapping) else None
    if begins is None:
        return mapped(batch, lambda tensor: tensor[number : number + 1] if tensor.ndim else tensor)
    text = _not_padding(batch)
    assert text is not None  # begins_of
    row, first = begins.nonzero()[number].tolist()
    ends = [*begins[row].nonzero().flatten().tolist(), int(text[row].nonzero()[-1]) + 1]
    tokens, t = slice(first, min(end for end in ends if end > first)), begins.shape[1]
    plain = {key: X for key, X in batch.items() if not key.startswith((_ENDS, _LONGEST))}
    return {key: _tokens_of_row(X, row, tokens, t) for key, X in plain.items()}


def _tokens_of_row(value: Any, row: int, tokens: slice, t: int) -> Any:
    """Some tokens of one of the rows of t tokens."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    value = value[row : row + 1]
    if value.ndim == 4 and value.shape[-2:] == (t, t):  # a mask of pairs of tokens
        return value[..., tokens, tokens]
    return value[:, tokens] if value.ndim > 1 and value.shape[1] == t else value


def _collated(data: Iterable[Any] | Dataset[Any], collator: Collator, batch_size: int) -> Iterator[Batch]:
    """Make batches of a dataset's rows, in order."""
    # a PyTorch dataset may not be iterable, and may accept indices beyond its length
    sized: Any = data
    rows = iter(data) if isinstance(data, Iterable) else (sized[index] for index in range(len(sized)))
    while chunk := [_without_text(row) for row in itertools.islice(rows, batch_size)]:
        yield collator(chunk)


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


def stated_ids(eos_token_id: int | Iterable[int] | None) -> list[int]:
    """The end tokens that a model's configuration states: none, one or several."""
    return [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


def require_examples_apart(data: Any, batches: Sequence[Batch], batch_size: int | None, end_ids: set[int]) -> None:
    """Refuse rows that a collator joined without saying where examples begin; warn of rows that look joined before.

    Args:
        data: The source of the batches.
        batch_size: Rows that a collator got at a time; by default that of a loader. Other data are not checked.
        end_ids: The model's end tokens.

    Rows that all begin with the same token are not joined: those would begin anywhere.

    Raises:
        DataError: Each batch has one row where several were read.
    """
    batch_size = batch_size or getattr(getattr(data, "batch_sampler", None), "batch_size", None)
    rows = [(batch["input_ids"], _not_padding(batch)) for batch in batches if "input_ids" in batch]
    if batch_size is None or not rows or any(begins_of(batch) is not None for batch in batches):
        return
    way_out = "weighting='token_sum' in CalibrationOptions gives each token the same weight instead."
    num_read = min(batch_size, operator.length_hint(getattr(data, "dataset", data), batch_size))
    if num_read > 1 and all(len(ids) == 1 for ids, _ in rows):
        raise DataError(
            f"Each example has the same weight in calibration, but {num_read} rows were joined to one, without a mark "
            f"where each begins. Let the collator return position_ids, seq_idx or cu_seq_lens_q; {way_out}"
        )
    longest, ends = max(ids.shape[1] for ids, _ in rows), torch.tensor(sorted(end_ids))
    first_tokens: list[int] = []  # of the full rows with end tokens inside
    for ids, text in rows:
        if ids.shape[1] == longest and text is not None:
            joined = torch.isin(ids[:, :-1], ends.to(ids.device)).any(1) & text.all(1)
            first_tokens += ids[joined, 0].tolist()
    if len(set(first_tokens)) > 1 and len(first_tokens) > sum(len(ids) for ids, _ in rows) / 2:
        warnings.warn(
            f"Most rows have {longest} tokens, end tokens inside and no padding, as packing_strategy='wrapped' makes "
            f"them. The beginnings of examples are not marked, so each row counts as one example; {way_out}",
            stacklevel=3,
        )


def _without_text(row: Any) -> Any:
    """Drop a tokenised row's text columns, as Trainer does: no collator can stack them."""
    if not isinstance(row, Mapping) or "input_ids" not in row:
        return row
    return {key: value for key, value in row.items() if not _is_text(value)}


def _is_text(value: Any) -> bool:
    if isinstance(value, list) and value:
        return _is_text(value[0])
    return value is None or isinstance(value, str | bytes | Mapping)


def labels_of(batch: Mapping[str, Any]) -> Tensor:
    """The labels of a batch.

    Raises:
        CalibrationError: The batch has no labels.
    """
    if batch.get("labels") is None:
        raise CalibrationError(
            "Calibration needs labels for its loss and its completion tokens, but a batch has the keys "
            f"{', '.join(sorted(batch))}. Add 'labels' (-100 on tokens without loss), or say what the loss is: "
            "calibrate(..., loss_fn=lambda model, batch: ...)."
        )
    return batch["labels"]


def predicted(labels: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The label that position t predicts: the next token's. The last position predicts none."""
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def targets_of(batch: Mapping[str, Any]) -> Int[Tensor, "b t"]:
    """The label that each position of a batch predicts; the last one of each example predicts none."""
    targets, begins = predicted(labels_of(batch)), begins_of(batch)
    return targets if begins is None else targets.masked_fill(pad(begins[:, 1:], (0, 1)), IGNORED)


def example_of_tokens(batch: Mapping[str, Any], targets: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The number of the example of each token of a batch, on the device of its targets."""
    begins = begins_of(batch)
    if begins is None:
        return torch.arange(len(targets), device=targets.device).unsqueeze(1).expand_as(targets)
    owners = begins.flatten().cumsum(0).sub(1).clamp(min=0)  # padding before the first token has no target
    return owners.view_as(targets).to(targets.device)


@dataclass(frozen=True)
class CountedTokens:
    """The tokens that count in a batch.

    Attributes:
        shape: b and t: examples, and tokens of an example, padding included.
        rows: The indices of the counted tokens in the b·t tokens, examples first; None means all.
    """

    shape: tuple[int, int]
    rows: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1]

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "b t"], *, device: torch.device | None = None) -> CountedTokens:
        """The tokens where a mask is true, for use on ``device``; a mask on the CPU avoids synchronising the device."""
        flat = mask.flatten()
        rows = None if bool(flat.all()) else to_device(flat.nonzero().squeeze(1), device)
        b, t = mask.shape
        return cls(shape=(b, t), rows=rows)


def shown_tokens(mask: Tensor) -> Bool[Tensor, "b t"]:
    """The tokens that an attention mask shows (b x t).

    In a mask of packed rows (b x heads x t x t, boolean, or additive: 0 shows) these are tokens that see themselves.
    """
    if mask.ndim == 2:
        return mask.bool()
    diagonal = mask.diagonal(dim1=-2, dim2=-1)
    seen = diagonal >= 0 if diagonal.is_floating_point() else diagonal.bool()
    return seen.any(1) if seen.ndim == 3 else seen


def counted_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b t"]:
    """The tokens of a batch of a decoder-only model whose x and δ enter the moments."""
    text = _not_padding(batch)
    assert text is not None  # it has tokens
    counted = _without_first(text, begins_of(batch), options.skip_first)
    return counted & targets_of(batch).ne(IGNORED) if options.tokens == "completion" else counted


def _without_first(
    text: Bool[Tensor, "b t"], begins: Bool[Tensor, "b t"] | None, skip_first: int
) -> Bool[Tensor, "b t"]:
    """The tokens of a text without the first ones of each row, or of each example of packed rows."""
    if not skip_first:
        return text
    place = text.cumsum(1)
    if begins is not None:
        place = place - torch.where(begins, place - 1, 0).cummax(1).values
    return text & (place > skip_first)
