"""The counted tokens of a batch: the rows of the flattened (batch x time) activations whose x and δ are summed.

An encoder-decoder model has two padding masks, the source's and the target's. A layer sees source tokens if it is in
the encoder, or if it reads the encoder's output (keys and values of cross-attention). Module names differ between
architectures, so a reader of the encoder's output is recognised by the tensor itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.device import sent
from frozencore.errors import CalibrationError

IGNORED = -100  # the label of a token without loss, as in transformers


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
    """The rows of the flattened activations that count in a batch.

    Attributes:
        rows: Their indices; None means all rows.
        only_nonzero_delta: Count only rows with a nonzero output error, known from the backward pass.
        or_all: Count all rows in a layer with another number of rows.
    """

    num_rows: int
    rows: Tensor | None
    only_nonzero_delta: bool = False
    or_all: bool = False

    @classmethod
    def from_mask(
        cls, mask: Bool[Tensor, "b t"], *, only_nonzero_delta: bool = False, device: torch.device | None = None
    ) -> CountedTokens:
        """The rows where a mask is true; a mask on the CPU avoids synchronising the device.

        Args:
            device: The device on which the rows will be used.
        """
        flat = mask.flatten()
        rows = None if bool(flat.all()) else sent(flat.nonzero().squeeze(1), device)
        return cls(num_rows=flat.numel(), rows=rows, only_nonzero_delta=only_nonzero_delta)

    @classmethod
    def of_call(
        cls, mask: Any, *, only_nonzero_delta: bool = False, device: torch.device | None = None
    ) -> CountedTokens:
        """The rows of one call, from its mask (b x t) if it has one; all rows in layers with another number of rows."""
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
    """The encoder's tokens of a batch: all that is not padding, because no completion is among them."""
    return _text(_ids(batch), batch.get("attention_mask"), options)


def counted_target_tokens(batch: Mapping[str, Tensor], options: CalibrationOptions) -> Bool[Tensor, "b t"]:
    """The decoder's tokens of a batch: by its mask if there is one, else the tokens that predict a label.

    A classifier has no label for each token. Its tokens are those of ``decoder_input_ids``, or else the source's.
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
    """All tokens that are not padding, without the skipped first tokens."""
    text = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device) if mask is None else mask.bool()
    return text & (text.cumsum(1) > options.skip_first) if options.skip_first else text


class EncoderSide:
    """Tells which layer calls read source tokens."""

    def __init__(self, encoder: nn.Module) -> None:
        self._inside = {id(module) for module in encoder.modules()}
        self._output: Tensor | None = None  # kept alive, because its address identifies it

    def reads_source(self, layer: nn.Module, x: Tensor) -> bool:
        """Return whether this call's input has a row for each source token.

        Addresses are compared, because checkpointing passes a detached x.
        """
        output = self._output
        from_encoder = output is not None and output.data_ptr() == x.data_ptr() and output.shape == x.shape
        return id(layer) in self._inside or from_encoder

    def remember(self, output: Any) -> None:
        self._output = output[0]

    def forget(self) -> None:
        self._output = None


@contextmanager
def watching_encoder(model: Any) -> Iterator[EncoderSide | None]:
    """Watch the encoder side of a model while it runs; None for a model with one mask."""
    if not is_encoder_decoder(model):
        yield None
        return
    encoder = model.get_encoder()
    side = EncoderSide(encoder)
    handle = encoder.register_forward_hook(lambda _, args, output: side.remember(output))
    try:
        yield side
    finally:
        handle.remove()


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
