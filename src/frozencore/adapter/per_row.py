"""Per-row cores: each row of a batch goes through one core.

    y += s·P(R[row] Qᵀx)

Adapters on one basis differ only in r x r numbers a layer. In a mixed batch, by PEFT's ``adapter_names`` or from a
:class:`frozencore.CoreBank`, each layer reads P and Q once and multiplies every row with its core, also in
training. Adapters on different bases compute their rows apart. PEFT passes the names to the tuner but not to the model,
so each layer refers to the batch's cores while it runs.

A row is an index of the first axis of a layer's input. A mixed batch is refused in layers whose first axis is not known
to be the batch (:mod:`frozencore.calibration.axes`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from frozencore.adapter.core_product import CorePart, PerRowCores, require_batch_axis
from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.attributes import with_attributes
from frozencore.calibration.axes import (
    NUM_ROWS,
    copies_of_first_row,
    find_batch_first,
    is_encoder_decoder,
    small_tokens,
)
from frozencore.errors import ConfigError
from frozencore.unwrapped_model import base_of

BASE_ROW = "__base__"  # PEFT's name for "no adapter"
ADAPTED = (FrozenCoreLinear, AuxiliaryTrainingWrapper)
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


@contextmanager
def adapter_of_each_row(model: nn.Module, names: Sequence[str], *, num_beams: int = 1) -> Iterator[None]:
    """Use the named adapters for the rows of every batch inside.

    Args:
        names: One adapter name, or ``"__base__"``, per row.
        num_beams: The number of copies of each row, behind the encoder if there is one.
    """
    layers = [module for module in model.modules() if isinstance(module, FrozenCoreLinear)]
    wrappers = [module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    known = {name for layer in layers for name in layer.frozencore_R}
    if unknown := sorted(set(names) - known - {BASE_ROW}):
        raise ValueError(
            f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. "
            f"The model has {', '.join(sorted(known))}, and {BASE_ROW} for the base model."
        )
    wanted = [name for name in dict.fromkeys(names) if name != BASE_ROW]
    together = all(
        len({_basis_of(layer, name) for name in wanted if name in layer.frozencore_R}) < 2 for layer in layers
    )
    if model.training and (wrappers or not together):
        raise ValueError(
            "Cannot pass `adapter_names` in training mode unless all share a basis and train nothing but cores. "
            "Call model.eval() first, or load cores of one basis."
        )
    times = repetitions(model, num_beams)
    cores_of = _stacked if together else _apart
    rows = {layer: cores_of(layer, wanted, _repeated(names, times(layer))) for layer in layers}
    with mixed_batch(model, rows, wrappers), ExitStack() as undo:
        for wrapper in wrappers:
            undo.callback(_pass_names(wrapper, _repeated(names, times(wrapper))))
        yield


def _basis_of(layer: FrozenCoreLinear, name: str) -> tuple[int, int, float]:
    return id(layer.frozencore_P[name]), id(layer.frozencore_Q[name]), layer.frozencore_scale[name]


def _repeated(names: Sequence[str], times: int) -> list[str]:
    return [name for name in names for _ in range(times)]


def _stacked(layer: FrozenCoreLinear, wanted: Sequence[str], names: Sequence[str]) -> PerRowCores:
    """The core of each row on the adapters' one basis; zeros for rows without an adapter in this layer."""
    here = [name for name in wanted if name in layer.frozencore_R]
    if not here:
        return PerRowCores((), len(names))
    cores = [layer.trained_factors(name)[2] for name in here]
    slot = {name: i for i, name in enumerate(here, start=1)}
    slots = torch.tensor([slot.get(name, 0) for name in names], device=cores[0].device)
    transposed = torch.stack([torch.zeros_like(cores[0]), *(R.mT for R in cores)]).index_select(0, slots)
    return layer.per_row_cores(here[0], transposed.mT)


def _apart(layer: FrozenCoreLinear, wanted: Sequence[str], names: Sequence[str]) -> PerRowCores:
    """The rows of each adapter, on the basis of that adapter."""
    parts = []
    for wanted_name in wanted:
        if wanted_name in layer.frozencore_R:
            P, Q, R = layer.trained_factors(wanted_name)
            rows = torch.tensor([i for i, name in enumerate(names) if name == wanted_name], device=R.device)
            parts.append(CorePart(P, Q, R, layer.frozencore_scale[wanted_name], rows))
    return PerRowCores(tuple(parts), len(names))


def _pass_names(wrapper: AuxiliaryTrainingWrapper, names: list[str]) -> Callable[[], None]:
    """Give the names to a trained copy of a module, which PEFT computes row by row; returns what undoes it."""

    adapters: Any = wrapper._adapters
    names = [name if name in adapters else BASE_ROW for name in names]

    def add_names(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if module._disable_adapters:  # it computes the base model
            return args, kwargs
        require_batch_axis(module, type(module).__name__)
        return args, {**kwargs, "adapter_names": names}

    return wrapper.register_forward_pre_hook(add_names, with_kwargs=True).remove


@contextmanager
def cores_of_rows(
    model: nn.Module,
    layers: Mapping[str, FrozenCoreLinear],
    adapter_name: str,
    cores: Mapping[str, Tensor],
    others: Iterable[nn.Module],
) -> Iterator[None]:
    """Use cores (rows x r x r, by layer) on one adapter's basis for the rows of every batch inside.

    Args:
        others: See :func:`other_modules`. They compute the base model for every row, whichever adapter is active.
    """
    rows = {layer: layer.per_row_cores(adapter_name, cores[name]) for name, layer in layers.items()}
    rows |= {module: PerRowCores() for module in others if isinstance(module, FrozenCoreLinear)}
    with mixed_batch(model, rows), ExitStack() as undo:
        for module in others:
            if isinstance(module, AuxiliaryTrainingWrapper):
                undo.enter_context(with_attributes(module, _disable_adapters=True))
        yield


def other_modules(model: nn.Module, layers: Mapping[str, FrozenCoreLinear]) -> list[nn.Module]:
    """The modules that other adapters change: layers besides these, and trained copies of modules."""
    return [
        module
        for module in model.modules()
        if isinstance(module, AuxiliaryTrainingWrapper)
        or (isinstance(module, FrozenCoreLinear) and module.name not in layers)
    ]


def repetitions(model: nn.Module, num_beams: int) -> Callable[[nn.Module], int]:
    """How often a module sees each row: once in an encoder, which runs before beams repeat the rows."""
    base = base_of(model)
    has_encoder = num_beams > 1 and is_encoder_decoder(base)
    in_encoder = {id(module) for module in base.get_encoder().modules()} if has_encoder else set()
    return lambda module: 1 if id(module) in in_encoder else num_beams


def lock_of(model: nn.Module) -> threading.RLock:
    """The lock of a model: only one thread runs a mixed batch on it."""
    return _LOCKS.setdefault(base_of(model), threading.RLock())


@contextmanager
def mixed_batch(
    model: nn.Module, rows: Mapping[FrozenCoreLinear, PerRowCores], wrappers: Sequence[nn.Module] = ()
) -> Iterator[None]:
    """Use per-row cores in layers, in place of their active adapters, for every batch inside.

    A batch inside another one has other rows; afterwards the outer batch goes on with its rows.

    Args:
        wrappers: Trained copies of modules, which compute row by row too.

    Raises:
        ValueError: A layer is merged, so that each row would get the merged update.
        ConfigError: Another asyncio task is inside of a batch; to wait for it would stop its loop.
    """
    with lock_of(model), ExitStack() as undo:
        for layer in rows:
            if layer.merged:
                raise ValueError(
                    "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
                )
            if layer.per_row is not None:
                layer.per_row.require_owner(layer.name)
        if any(getattr(module, "has_batch_axis", None) is None for module in (*rows, *wrappers)):
            _find_batch_axes(base_of(model), undo)
        undo.enter_context(_in_layers(rows))
        undo.enter_context(guard_recompute(model))
        yield


@contextmanager
def _in_layers(rows: Mapping[FrozenCoreLinear, PerRowCores]) -> Iterator[None]:
    """Use per-row cores inside, and those of the outer batch afterwards; refuses batches of generators that overlap."""
    before = {layer: layer.per_row for layer in rows}
    for layer, cores in rows.items():
        layer.per_row = cores
    try:
        yield
    finally:
        is_inner = all(layer.per_row is cores for layer, cores in rows.items())
        for layer, outer in before.items():
            layer.per_row = outer if is_inner else None
        if not is_inner:
            raise ConfigError(
                "A batch inside another one ends first, but these two overlapped, so passes since the second one began "
                "had its rows. Let one generator at a time be inside of bank.rows(...)."
            )


@contextmanager
def guard_recompute(model: nn.Module) -> Iterator[None]:
    """Let gradient checkpointing fail where it computes a block again with other adapters or rows than at first."""
    layers = (module for module in model.modules() if isinstance(module, FrozenCoreLinear))
    if torch.compiler.is_compiling() or not model.training or (layer := next(layers, None)) is None:
        yield
        return

    def state() -> tuple[object, ...]:
        return layer.per_row, tuple(layer.active_adapters), layer.disable_adapters, layer.merged

    def again(before: tuple[object, ...], block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if state() != before:
            raise ConfigError(
                "Gradient checkpointing computes a block again in backward, but the rows of the batch were left since, "
                "or other adapters are active. Call backward inside of bank.rows(...) and before set_adapter; call "
                "model.gradient_checkpointing_disable() before a batch with adapter_names."
            )
        return block(*args, **kwargs)

    def checked(checkpoint: Callable[..., Any], block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(again, state(), block), *args, **kwargs)

    with ExitStack() as undo:
        for module in model.modules():
            if (checkpoint := vars(module).get("_gradient_checkpointing_func")) is not None:
                undo.enter_context(with_attributes(module, _gradient_checkpointing_func=partial(checked, checkpoint)))
        yield


@torch.compiler.disable
def _find_batch_axes(base: Any, undo: ExitStack) -> None:
    """Find the layers whose first axis is the batch, once a model (:mod:`frozencore.calibration.axes`)."""
    base = getattr(base, "_orig_mod", base)  # a compiled model

    def unknown(part: nn.Module) -> list[Any]:
        adapted = (module for module in part.modules() if isinstance(module, ADAPTED))
        return [module for module in adapted if getattr(module, "has_batch_axis", None) is None]

    tokens = small_tokens(base)
    reads_tokens = inspect.signature(base.forward).parameters.keys() >= tokens.keys()
    if reads_tokens and _run_small(base, base, NUM_ROWS, (), tokens):
        for module in unknown(base):
            module.has_batch_axis = False  # never called
        return
    is_running: list[bool] = []

    def run_copies(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not is_running and unknown(module):
            is_running.append(True)  # an encoder is called inside of its model
            _run_small(base, module, *copies_of_first_row(args, kwargs))
            is_running.clear()

    for module in (base, base.get_encoder()) if is_encoder_decoder(base) else (base,):
        undo.callback(module.register_forward_pre_hook(run_copies, with_kwargs=True).remove)


def _run_small(base: nn.Module, part: nn.Module, num_rows: int, args: Any, kwargs: dict[str, Any]) -> bool:
    """Record in each layer whether the first axis of its input is the batch; False if the model does not run."""
    adapted: list[Any] = [module for module in base.modules() if isinstance(module, ADAPTED)]
    with ExitStack() as undo:
        for module in base.modules():
            undo.callback(setattr, module, "training", module.training)
        base.eval()
        for module in adapted:
            alone = {"per_row": PerRowCores()} if isinstance(module, FrozenCoreLinear) else {"_disable_adapters": True}
            undo.enter_context(with_attributes(module, **alone))
        batch_first = find_batch_first(base, part, adapted, num_rows, args, kwargs)
    for layer, is_first in (batch_first or {}).items():
        layer.has_batch_axis = is_first  # type: ignore[assignment]  # PEFT's wrappers have none
    return batch_first is not None
