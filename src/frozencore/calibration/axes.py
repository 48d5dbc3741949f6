"""The axes of a model: which axis of a layer's input is the batch, found by a small pass, once a model.

A layer usually reads b x t x n values or b·t x n. Some models put tokens or windows first, and routed experts see
tokens of any row. A pass of two rows of three tokens shows the order. Models that read no tokens, or more than tokens,
run on copies of the first row of their first batch, as many as no other axis of their inputs has values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from frozencore.calibration.preserve import own_random_state
from frozencore.device import execution_device

NUM_ROWS, NUM_TOKENS = 2, 3


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def small_tokens(model: nn.Module) -> dict[str, Tensor]:
    """Two rows of three tokens, for a model that reads token ids."""
    ids = torch.tensor([[1, 2, 3]] * NUM_ROWS, device=execution_device(model))
    return dict.fromkeys(("input_ids", "decoder_input_ids") if is_encoder_decoder(model) else ("input_ids",), ids)


def copies_of_first_row(args: Any, kwargs: Mapping[str, Any]) -> tuple[int, Any, dict[str, Any]]:
    """Copies of the first row of a batch, and their number; without a cache, which a pass would change."""
    inputs = args, {name: value for name, value in kwargs.items() if name != "past_key_values"}
    shapes = [value.shape for value in tree_leaves(inputs) if isinstance(value, Tensor) and value.ndim]
    others = {length for shape in shapes for length in shape[1:]}
    number = next(number for number in count(2) if number not in others)
    copied: Any = tree_map_only(Tensor, lambda x: x[[0] * number] if x.ndim and len(x) == shapes[0][0] else x, inputs)
    return number, copied[0], copied[1]


def input_shapes(
    part: nn.Module, layers: Iterable[nn.Module], args: Any, kwargs: Mapping[str, Any]
) -> dict[nn.Module, list[torch.Size]] | None:
    """Run a model or its encoder; returns the shapes of the inputs of each layer that it calls, None if it fails."""
    shapes: dict[nn.Module, list[torch.Size]] = {}

    def add(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        shapes.setdefault(layer, []).append(x.shape)

    with ExitStack() as undo, own_random_state(), torch.no_grad():
        for layer in layers:
            undo.callback(layer.register_forward_pre_hook(add, with_kwargs=True).remove)
        try:
            part(*args, **kwargs)
        except Exception:  # any model's, on inputs that its user did not give
            return None
    return shapes


def find_seq_first_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
    """The names of the layers of a language model that read tokens before rows; none if it does not run."""
    tokens = small_tokens(model)
    tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])  # some models have no default
    shapes = input_shapes(model, layers.values(), (), tokens) or {}
    seq_first = (NUM_TOKENS, NUM_ROWS)
    return {name for name, layer in layers.items() if any(x[:2] == seq_first for x in shapes.get(layer, ()))}


def find_batch_first(
    base: nn.Module, part: nn.Module, modules: Iterable[nn.Module], num_rows: int, args: Any, kwargs: Mapping[str, Any]
) -> dict[nn.Module, bool] | None:
    """Run a part of a model on this number of rows, and look whether the first axis of each module's input is the rows.

    Returns:
        None if the part does not run on these inputs.
    """
    shapes = input_shapes(part, modules, args, kwargs)
    if shapes is None:
        return None
    routed = {module for name, module in base.named_modules() if module in shapes and _is_routed(name, base)}
    return {
        module: module not in routed and {shape[:1] for shape in its} == {(num_rows,)} for module, its in shapes.items()
    }


def _is_routed(name: str, base: nn.Module) -> bool:
    """Whether a layer is inside of a routed expert, which sees tokens of any row; a shared one sees all."""
    parts, module = name.split(".")[:-1], base
    for part in parts:
        module = getattr(module, part)
        if any("expert" in word.lower() and "shared" not in word.lower() for word in (part, type(module).__name__)):
            return True
    return False
