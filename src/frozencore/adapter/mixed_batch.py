"""Mixed batches: each row uses the adapter that ``adapter_names`` gives it.

If the named adapters share a basis, each layer reads P and Q once and multiplies every row with its own core, also in
training. Otherwise each adapter computes its own rows. PEFT passes the names to the tuner but not to the model, so
forward hooks pass them to the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from frozencore.adapter.layer import FrozenCoreLayer, RowCores
from frozencore.quiet import with_attributes

BASE_ROW = "__base__"  # PEFT's name for "no adapter"


@contextmanager
def adapter_of_each_row(model: nn.Module, names: Sequence[str], *, num_beams: int = 1) -> Iterator[None]:
    """Use the named adapters for the rows of every batch inside.

    Args:
        names: One adapter name, or ``"__base__"``, per row.
        num_beams: The number of copies of each row, behind the encoder if there is one.
    """
    layers = [m for m in model.modules() if isinstance(m, FrozenCoreLayer | AuxiliaryTrainingWrapper)]
    frozen = [layer for layer in layers if isinstance(layer, FrozenCoreLayer)]
    known = {name for layer in frozen for name in layer.frozencore_R}
    unknown = sorted(set(names) - known - {BASE_ROW})
    if unknown:
        raise ValueError(
            f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. "
            f"The model has {', '.join(sorted(known))}, and {BASE_ROW} for the base model."
        )
    wanted = [name for name in dict.fromkeys(names) if name != BASE_ROW]
    kinds = [
        {
            (id(layer.frozencore_P[name]), id(layer.frozencore_Q[name]), layer.frozencore_scale[name])
            for name in wanted
            if name in layer.frozencore_R
        }
        for layer in frozen
    ]
    together = all(len(kinds_here) <= 1 for kinds_here in kinds)
    if model.training and (not together or len(layers) > len(frozen)):
        raise ValueError(
            "Cannot pass `adapter_names` in training mode unless all share a basis and train nothing but cores. "
            "Call model.eval() first, or load cores of one basis."
        )
    of_each_beam = [name for name in names for _ in range(num_beams)]
    in_encoder = {id(module) for module in encoder_modules(model)}
    with ExitStack() as undo:
        for layer in layers:
            names_here = list(names) if id(layer) in in_encoder else of_each_beam
            if together and isinstance(layer, FrozenCoreLayer):
                undo.enter_context(rows_through(layer, _row_cores(layer, wanted, names_here)))
            else:
                handle = layer.register_forward_pre_hook(_passes_names(layer, names_here), with_kwargs=True)
                undo.callback(handle.remove)
        yield


@contextmanager
def rows_through(layer: FrozenCoreLayer, rows: RowCores) -> Iterator[None]:
    """Use the rows' own cores in a layer, in place of its active adapters, for every batch inside."""
    layer.require_unmerged()
    with with_attributes(layer, row_cores=rows):  # an outer batch goes on with its own rows
        yield


def other_modules(model: nn.Module, own: Container[str]) -> list[FrozenCoreLayer | AuxiliaryTrainingWrapper]:
    """What other adapters change in a model: layers besides those named ``own``, and trained copies of modules."""
    return [
        module
        for module in model.modules()
        if isinstance(module, AuxiliaryTrainingWrapper)
        or (isinstance(module, FrozenCoreLayer) and module.name not in own)
    ]


@contextmanager
def base_rows(
    others: Iterable[FrozenCoreLayer | AuxiliaryTrainingWrapper], num_rows: Callable[[nn.Module], int]
) -> Iterator[None]:
    """Use the base model for every row in the modules of other adapters, whichever is active."""
    with ExitStack() as undo:
        for module in others:
            if isinstance(module, FrozenCoreLayer):
                undo.enter_context(rows_through(module, RowCores(None, torch.empty(num_rows(module), 0, 0))))
            else:
                undo.enter_context(with_attributes(module, _disable_adapters=True))
        yield


def _row_cores(layer: FrozenCoreLayer, wanted: Sequence[str], names: Sequence[str]) -> RowCores:
    """The core of each row; zeros for rows without an adapter in this layer."""
    here = [name for name in wanted if name in layer.frozencore_R]
    if not here:
        return RowCores(None, torch.empty(len(names), 0, 0))
    cores = [layer._trained_factors(name)[2] for name in here]
    slot: Mapping[str, int] = {name: i for i, name in enumerate(here, start=1)}
    slots = torch.tensor([slot.get(name, 0) for name in names], device=cores[0].device)
    transposed = torch.stack([torch.zeros_like(cores[0]), *(R.mT for R in cores)]).index_select(0, slots)
    return layer.row_cores_of(here[0], transposed.mT)


def _passes_names(layer: Any, names: list[str]) -> Any:
    """Make a hook that passes the names to a layer, except within a batch inside this one that has other rows."""
    outer = getattr(layer, "row_cores", None)

    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_own = getattr(layer, "row_cores", None) is outer
        return args, {**kwargs, "adapter_names": names} if is_own else kwargs

    return hook


def encoder_modules(model: Any) -> Iterator[nn.Module]:
    """The modules of an encoder that runs once, before beams repeat the rows."""
    base = getattr(model, "model", model)
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        yield from base.get_encoder().modules()
