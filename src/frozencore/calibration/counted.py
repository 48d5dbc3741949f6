"""Which tokens of a batch count: the rows of the flattened (batch x time) activations whose x and δ are summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from frozencore.calibration.loss import IGNORED, labels_of, predicted
from frozencore.calibration.options import CalibrationOptions
from frozencore.device import sent


@dataclass(frozen=True)
class CountedTokens:
    """Which rows of the flattened activations count in a batch.

    Attributes:
        rows: Their indices; None is all of them.
        only_nonzero_delta: Of these, the ones whose output error is not zero: known in the backward pass only.
        or_all: In a layer that sees another number of rows, all of them count.
    """

    num_rows: int
    rows: Tensor | None
    only_nonzero_delta: bool = False
    or_all: bool = False

    @classmethod
    def from_mask(
        cls, mask: Bool[Tensor, "b t"], *, only_nonzero_delta: bool = False, device: torch.device | None = None
    ) -> CountedTokens:
        """Those of a mask that is best on the CPU, which has not to wait for it.

        Args:
            device: Where the rows will be asked for.
        """
        flat = mask.flatten()
        rows = None if bool(flat.all()) else sent(flat.nonzero().squeeze(1), device)
        return cls(num_rows=flat.numel(), rows=rows, only_nonzero_delta=only_nonzero_delta)

    @classmethod
    def of_call(
        cls, mask: Any, *, only_nonzero_delta: bool = False, device: torch.device | None = None
    ) -> CountedTokens:
        """Those of one call of a model, by its mask (b x t) if it has one: every row of layers that see other rows."""
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return cls(0, None, only_nonzero_delta, or_all=True)
        found = cls.from_mask(mask.bool(), only_nonzero_delta=only_nonzero_delta, device=device)
        return replace(found, or_all=True)


def counted_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b t"]:
    """The tokens of a batch whose x and δ enter the moments."""
    counted = _text(_ids(batch), batch.get("attention_mask"), options)
    if options.tokens == "completion":
        counted = counted & predicted(labels_of(batch)).ne(IGNORED)
    return counted


def counted_source_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b s"]:
    """The encoder's tokens of a batch; none of them is completion, so all that is not padding counts."""
    return _text(_ids(batch), batch.get("attention_mask"), options)


def counted_target_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b t"]:
    """The decoder's tokens of a batch: its mask if there is one, else those that predict a label.

    Without labels per token, as in a classifier, the decoder reads what it is given, or the source once more.
    """
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if labels is None or labels.ndim < 2:
        ids = batch.get("decoder_input_ids")
        return counted_source_tokens(batch, options) if ids is None else _text(ids, mask, options)
    predicts = labels.ne(IGNORED)
    counted = _text(labels, predicts if mask is None else mask, options)
    return counted & predicts if options.tokens == "completion" else counted


def _ids(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"][..., 0]


def _text(ids: Tensor, mask: Tensor | None, options: CalibrationOptions) -> Tensor:
    """What is not padding, but for the first tokens."""
    text = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device) if mask is None else mask.bool()
    return text & (text.cumsum(1) > options.skip_first) if options.skip_first else text
