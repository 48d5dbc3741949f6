"""Whether adapters are of one base model: by its name, by their layers, and by sampled weights where these are known.

A LoRA records no weights, and one model has many names. So names must be equal, unless the base model is given or the
caller passes ``same_base``; layers, shapes and known weights are always compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.adapter.base_record import differing_layer, differs, record_base, samples_of, split_record
from frozencore.adapter.core import BASE
from frozencore.adapter.export.base_model import in_other_class, layers_by_class, layers_of
from frozencore.adapter.low_rank_adapter import LowRankAdapter
from frozencore.errors import ModelError

Shapes = Mapping[str, tuple[int, int]]
LEGACY_OWNERS = frozenset({
    "google-bert", "openai-community", "FacebookAI", "distilbert", "google-t5", "albert", "xlnet", "almanach",
})  # fmt: skip
"""Owners on the hub of models that once had no owner, and can still be named without one."""


def name_of_base(adapters: Iterable[LowRankAdapter], base: nn.Module | None) -> tuple[str | None, str | None]:
    """The name of the given base model, else that in most adapters; and the revision with which they name it."""
    named = Counter((one.base_model, one.revision) for one in adapters if one.base_model)
    usual = next((pair for pair, _ in named.most_common(1)), (None, None))
    given = getattr(base, "name_or_path", None) or usual[0]
    return usual if given == usual[0] else (given, None)


def other_names(adapters: Iterable[LowRankAdapter], base: nn.Module | None) -> list[str]:
    """The names that adapters give their base model and that are not the given model's, or not all the same."""
    names = {name for one in adapters if (name := _with_revision(one))}
    if base is None:
        return sorted(names) if len(names) > 1 else []
    return sorted(names - {_short(str(getattr(base, "name_or_path", "")))})


def mismatched_adapters(
    adapters: Mapping[str, LowRankAdapter], base: nn.Module | None, *, same_base: bool
) -> dict[str, str]:
    """The adapters of another base model than the given one, or than the other adapters have, each with the reason.

    Args:
        same_base: Do not compare names. They are not compared with a given model's either.
    """
    names = Counter(name for one in adapters.values() if (name := _with_revision(one)))
    usual, number = next(iter(names.most_common(1)), (None, 0))
    known = dict(layers_of(base).shapes) if base is not None else dict[str, tuple[int, int]]()
    looked_up, classes = dict[str, tuple[int, int]](), _classes(*name_of_base(adapters.values(), base))
    samples = samples_of(base, known) if base is not None else {}
    records: dict[str, Mapping[str, str]] = {}
    reasons: dict[str, str] = {}
    adapted, trained = set[str](), set[str]()  # layers with factors, and modules trained as a whole, so far
    for name, one in adapters.items():
        record = {} if one.base is None else split_record(one.base, one.shapes)
        if base is None and not same_base and (_with_revision(one) or usual) != usual:
            reasons[name] = (
                f"names the base model {_with_revision(one)}, where {number} of {len(adapters)} name {usual}. If "
                "both are one model, give --same-base, or --model to compare layers"
            )
        elif reason := (
            _other_layer(one.shapes, known)
            if base is not None
            else _mixed_layer(one.shapes, known) or _unknown_layer(one.shapes, looked_up, classes)
        ):
            reasons[name] = reason
        elif copied := next((layer for layer, X in one.copies.items() if not _is_weight(X, layer, base)), None):
            also = "is not the base model's" if base is not None else "only --model can compare"
            reasons[name] = f"has a copy of the weight of {copied!r}, which {also}"
        elif base is not None and one.base is not None:
            odd = differing_layer(one.base, {layer: samples[layer] for layer in one.shapes})
            if odd is not None:
                reasons[name] = f"was made on another weight of layer {odd!r}"
        elif any(differs(record[layer], records[layer]) for layer in record.keys() & records.keys()):
            reasons[name] = "was made on other weights than an earlier frozen core"
        whole = {key.removeprefix(BASE).rpartition(".")[0] for key in one.modules}
        if name not in reasons and (reason := _trained_twice(one.shapes, whole, adapted, trained)):
            reasons[name] = reason
        if name not in reasons:
            adapted, trained = {*adapted, *one.shapes}, trained | whole
        if name not in reasons and base is None:
            known, records = {**one.shapes, **known}, {**record, **records}
    return reasons


def _trained_twice(
    layers: Collection[str], whole: Collection[str], adapted: Collection[str], trained: Collection[str]
) -> str | None:
    """A layer that this adapter adapts and another trains as a whole, or the other way around."""
    for mine, theirs, words in (
        (layers, trained, "adapts the layer {!r}, which an earlier adapter trains as a whole (modules_to_save)"),
        (adapted, whole, "trains the layer {!r} as a whole (modules_to_save), which an earlier adapter adapts"),
    ):
        for layer in mine:
            if any(layer == module or layer.startswith(f"{module}.") for module in theirs):
                return words.format(layer)
    return None


def _with_revision(one: LowRankAdapter) -> str | None:
    name = one.base_model and _short(one.base_model)
    return name if not name or one.revision in (None, "main") else f"{name} at revision {one.revision}"


def _short(name: str) -> str:
    """The name of a model that the hub also knows without its owner: ``gpt2`` is ``openai-community/gpt2``."""
    owner, _, model = name.partition("/")
    return model if owner in LEGACY_OWNERS else name


def _other_layer(shapes: Shapes, known: Shapes) -> str | None:
    """A layer that is missing, or has another shape, in the whole base model."""
    for layer, shape in shapes.items():
        if (there := known.get(layer)) != shape:
            if other := in_other_class(layer, shape, known):
                return (
                    f"has a layer {layer!r}, which is {other!r} in the base model: it was trained in another class, "
                    "such as AutoModelForCausalLM. Save the base model in that class, and name that folder"
                )
            size = f"{there[0]} x {there[1]}" if there else "missing"
            return f"has a layer {layer!r} of {shape[0]} x {shape[1]}, which is {size} in the base model"
    return None


def _mixed_layer(shapes: Shapes, known: Shapes) -> str | None:
    """A layer that has another shape in earlier adapters, or stacks of layers that have other names there."""
    if reason := _other_layer({layer: shape for layer, shape in shapes.items() if layer in known}, known):
        return reason
    stacks, theirs = ({stack for layer in layers if (stack := _stack(layer))} for layers in (shapes, known))
    if stacks and theirs and stacks.isdisjoint(theirs):
        return (
            f"has its layers in {', '.join(sorted(stacks))}, where the adapters before have theirs in "
            f"{', '.join(sorted(theirs))}. It was saved from a part of the model or another class of it, or adapts "
            "another part: with --model its layers are looked up there"
        )
    return None


def _classes(base: str | None, revision: str | None) -> Iterator[Shapes]:
    """The layers of a named base model by class; none if it cannot be read here."""
    with suppress(ModelError):
        yield from layers_by_class(base, revision) if base else ()


def _unknown_layer(shapes: Shapes, looked_up: dict[str, tuple[int, int]], classes: Iterator[Shapes]) -> str | None:
    """A layer that the named base model has in no class.

    Args:
        looked_up: Its layers in the classes so far; those of the next class are added until all layers are there.
    """
    while (reason := _other_layer(shapes, looked_up)) and (more := next(classes, None)):
        looked_up.update(more)
    return reason if looked_up else None


def _is_weight(copied: Tensor, layer: str, base: nn.Module | None) -> bool:
    weight: Any = None if base is None else base.get_submodule(layer).weight
    return weight is not None and weight.shape == copied.shape and torch.equal(weight.cpu().to(copied.dtype), copied)


def _stack(layer: str) -> str | None:
    """The module that numbers its layers, as ``model.layers``."""
    match = re.match(r"(.+?)\.\d+\.", layer)
    return match and match[1]


def record_of_base(
    adapters: Iterable[LowRankAdapter], layers: Mapping[str, tuple[int, int]], base: nn.Module | None
) -> Mapping[str, str] | None:
    """Some values of the base model's weights: from the model, or from an adapter that has all layers."""
    if base is not None:
        return record_base(samples_of(base, layers))
    records = (one.base for one in adapters if one.shapes.keys() == layers.keys())
    return next((record for record in records if record is not None), None)
