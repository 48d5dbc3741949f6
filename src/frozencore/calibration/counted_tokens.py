"""The counted tokens of a batch: the rows of a layer's input whose x and δ are summed.

A layer's input has a row for each token, examples first (b x t x n, the usual order) or tokens first (t x b x n), or
flattened to b·t x n; or it has rows that do not depend on the batch, such as embeddings of relative positions. Equal
numbers of rows prove neither. Where the shape does not show the order, the model runs on one example alone, and its
rows are compared with those of the whole batch.

An encoder-decoder model has two padding masks, the source's and the target's. A layer sees source tokens if it is in
the encoder, or if it reads the encoder's output (keys and values of cross-attention). Module names differ between
architectures, so a reader of the encoder's output is recognised by the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.device import sent
from frozencore.errors import CalibrationError

IGNORED = -100  # the label of a token without loss, as in transformers
NUM_COMPARED = 8  # rows of an example that show the order of a layer's rows
Order = Literal["examples first", "tokens first", "no tokens"]


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
        shape: b and t: examples, and tokens of an example, padding included; None if the batch does not say them.
        rows: The indices of the counted tokens in the b·t tokens, examples first; None means all.
        only_nonzero_delta: Count only rows with a nonzero output error, known from the backward pass.
        or_all: Count all rows in a layer with another number of rows.
    """

    shape: tuple[int, int] | None
    rows: Tensor | None
    only_nonzero_delta: bool = False
    or_all: bool = False

    @property
    def num_rows(self) -> int:
        return 0 if self.shape is None else self.shape[0] * self.shape[1]

    def tokens_first(self) -> CountedTokens:
        """The same tokens as rows of an input with tokens first: token j of example i is row ``j b + i``."""
        if self.rows is None or self.shape is None:
            return self
        b, t = self.shape
        return replace(self, rows=(self.rows % t * b + self.rows // t).sort().values)

    def positions(self, example: int) -> list[int]:
        """The last counted tokens of an example."""
        if self.shape is None:
            return []
        t = self.shape[1]
        rows = range(example * t, (example + 1) * t) if self.rows is None else self.rows.tolist()
        return [row - example * t for row in rows if row // t == example][-NUM_COMPARED:]

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
        b, t = mask.shape
        return cls(shape=(b, t), rows=rows, only_nonzero_delta=only_nonzero_delta)

    @classmethod
    def of_call(
        cls, mask: Any, *, only_nonzero_delta: bool = False, device: torch.device | None = None
    ) -> CountedTokens:
        """The rows of one call, from its mask (b x t) if it has one; all rows in layers with another number of rows."""
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return cls(None, None, only_nonzero_delta, or_all=True)
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


def has_target_tokens(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch tells the decoder's tokens by labels or ids."""
    labels = batch.get("labels")
    return (isinstance(labels, Tensor) and labels.ndim == 2) or "decoder_input_ids" in batch


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


@dataclass(frozen=True)
class CallAlone:
    """One call of a layer with one example alone.

    Attributes:
        shape: Of the input without its features.
        rows: The rows to compare, if the input is in that order.
    """

    shape: tuple[int, ...]
    rows: Mapping[Order, Tensor]


class RowOrders:
    """The order of the rows of each layer's input, from shapes and from one example alone.

    Attributes:
        run_alone: Runs one example of the current batch alone; None if it ran, or cannot run.
        example: Which example that was.
        copies: How many times it was in its own batch: twice if the current batch has no other example.
        looks: The example runs now.
    """

    def __init__(self) -> None:
        self.run_alone: Callable[[], None] | None = None
        self.example = 0
        self.copies = 1
        self.looks = False
        self._alone: dict[str, list[CallAlone]] = {}
        self._known: dict[tuple[str, int], Order] = {}  # by layer and dimensions of rows; 0 if b or t is 1
        self._fixed: dict[str, set[tuple[int, ...]]] = {}

    def see(self, name: str, x: Tensor, tokens: CountedTokens) -> None:
        """Keep some rows of a call with the example alone; ``tokens`` are those of the whole batch."""
        rows = x.detach().reshape(-1, x.shape[-1])
        found: dict[Order, Tensor] = {}
        positions = tokens.positions(self.example)
        if positions and tokens.shape and len(rows) == self.copies * tokens.shape[1]:
            found["examples first"] = rows[positions]
            found["tokens first"] = rows[[self.copies * j for j in positions]]
        found["no tokens"] = rows[:NUM_COMPARED].clone()
        self._alone.setdefault(name, []).append(CallAlone(tuple(x.shape[:-1]), found))

    def forget(self) -> None:
        """Release the rows of the example; the next batch is another one."""
        self._alone.clear()
        self.run_alone = None

    def of(self, name: str, x: Tensor, tokens: CountedTokens) -> Order | None:
        """The order of the rows of a layer's input; None if it cannot be known."""
        shape = tuple(x.shape[:-1])
        b, t = tokens.shape if tokens.shape is not None else (0, 0)
        if b != t and min(b, t) > 1 and shape in ((b, t), (t, b)):
            order: Order = "examples first" if shape == (b, t) else "tokens first"
            self._known[name, 2] = order
            return order
        is_fixed, has_all = shape in self._fixed.get(name, ()), x[..., 0].numel() == b * t
        if is_fixed and not has_all:
            return "no tokens"
        known = self._known.get((name, len(shape) if min(b, t) > 1 else 0))
        if has_all and known and not is_fixed:
            return known
        if self.run_alone is not None:
            run, self.run_alone = self.run_alone, None
            run()
        if name in self._alone:
            return self._compared(name, x, tokens)
        return "examples first" if has_all and min(b, t) == 1 and not is_fixed else None

    def _compared(self, name: str, x: Tensor, tokens: CountedTokens) -> Order | None:
        """The order in which the rows are nearest to those of the example alone, if they are near."""
        shape, rows = tuple(x.shape[:-1]), x.detach().reshape(-1, x.shape[-1])
        places: dict[Order, list[int]] = {}
        b, t = tokens.shape if tokens.shape is not None else (0, 0)
        positions = tokens.positions(self.example)
        if positions and len(rows) == b * t:
            places["examples first"] = [self.example * t + j for j in positions]
            places["tokens first"] = [j * b + self.example for j in positions]
        distances: dict[Order, float] = {}
        for call in self._alone[name]:
            here: dict[Order, list[int]] = places if shape != call.shape else {**places, "no tokens": []}
            for order in here.keys() & call.rows.keys():
                kept = call.rows[order].double()
                mine = rows[:NUM_COMPARED] if order == "no tokens" else rows[places[order]]
                distance = float((mine.double() - kept).norm() / kept.norm().clamp_min(torch.finfo(torch.double).tiny))
                order = "examples first" if min(b, t) == 1 and order != "no tokens" else order
                distances[order] = min(distance, distances.get(order, distance))
        near = sorted(distances, key=distances.__getitem__)
        if not near or distances[near[0]] > 0.3 or (near[1:] and distances[near[0]] >= distances[near[1]] / 2):
            return None
        if near[0] == "no tokens":
            self._fixed.setdefault(name, set()).add(shape)
        else:
            self._known[name, len(shape) if min(b, t) > 1 else 0] = near[0]
        return near[0]


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
    def kept(self) -> Iterator[None]:
        """Keep the encoder's output while the model runs on something else."""
        output = self._output
        try:
            yield
        finally:
            self._output = output


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
