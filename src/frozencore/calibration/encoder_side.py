"""In an encoder-decoder model two padding masks are at work: the source's and the target's.

A layer sees source tokens if it is in the encoder, or if it reads the encoder's output (keys and values of
cross-attention). Only the tensor itself tells the latter: module names differ between architectures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class EncoderSide:
    """Tells which layer calls read source tokens."""

    def __init__(self, encoder: nn.Module) -> None:
        self._inside = {id(module) for module in encoder.modules()}
        self._output: Tensor | None = None  # held so that its memory is not reused: its address identifies it

    def reads_source(self, layer: nn.Module, x: Tensor) -> bool:
        """Whether this call's input has a row per source token. Recomputation under checkpointing detaches x."""
        output = self._output
        from_encoder = output is not None and output.data_ptr() == x.data_ptr() and output.shape == x.shape
        return id(layer) in self._inside or from_encoder

    def remember(self, output: Any) -> None:
        self._output = output[0]

    def forget(self) -> None:
        self._output = None


@contextmanager
def watching_encoder(model: Any) -> Iterator[EncoderSide | None]:
    """The encoder side of a model while it runs; None for a model with one mask."""
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
