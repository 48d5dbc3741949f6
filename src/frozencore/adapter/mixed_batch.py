"""One batch, several adapters: each row goes through the adapter that ``adapter_names`` gives it.

PEFT hands the names to the tuner and drops them before the model runs; forward hooks carry them to the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from frozencore.adapter.layer import FrozenCoreLayer

BASE_ROW = "__base__"  # PEFT's name for "no adapter"


@contextmanager
def adapter_of_each_row(model: nn.Module, names: Sequence[str], *, num_beams: int = 1) -> Iterator[None]:
    """Send the rows of every batch inside through the named adapters.

    Args:
        names: One adapter name, or ``"__base__"``, per row.
        num_beams: Rows are repeated that often behind the encoder, if there is one, else from the start.

    Raises:
        ValueError: The model is in training mode, or no layer has an adapter of that name.
    """
    if model.training:
        raise ValueError("Cannot pass `adapter_names` when the model is in training mode. Call model.eval() first.")
    layers = [m for m in model.modules() if isinstance(m, FrozenCoreLayer | AuxiliaryTrainingWrapper)]
    known = {name for layer in layers if isinstance(layer, FrozenCoreLayer) for name in layer.frozencore_R}
    unknown = sorted(set(names) - known - {BASE_ROW})
    if unknown:
        raise ValueError(
            f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. "
            f"The model has {', '.join(sorted(known))}, and {BASE_ROW} for the base model."
        )
    of_each_beam = [name for name in names for _ in range(num_beams)]
    in_encoder = {id(module) for module in _encoder_modules(model)}
    with ExitStack() as undo:
        for layer in layers:
            names_here = list(names) if id(layer) in in_encoder else of_each_beam
            handle = layer.register_forward_pre_hook(_passes_names(names_here), with_kwargs=True)
            undo.callback(handle.remove)
        yield


def _passes_names(names: list[str]) -> Any:
    return lambda _, args, kwargs: (args, {**kwargs, "adapter_names": names})


def _encoder_modules(model: Any) -> Iterator[nn.Module]:
    """The modules of an encoder that runs once, before beams multiply the rows."""
    base = getattr(model, "model", model)
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        yield from base.get_encoder().modules()
