"""Whether adapters are of one base model: by its name, by the names and shapes of layers, and by sampled weights.

A LoRA records nothing but a name, and one model has many: a hub id, a local copy, a path with a slash at its end, a
4-bit copy. So names are alike if their last parts are, and layers and weights decide where they are known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from torch import nn

from frozencore.adapter.export.base_model import layers_of
from frozencore.adapter.saved.base_record import (
    differing_layer,
    differs,
    join_records,
    record_base,
    samples_of,
    split_record,
)
from frozencore.files.adapter_folder import is_folder

_QUANTISED = re.compile(r"(-unsloth)?-bnb-[48]bit$")  # unsloth's copies, on which many LoRAs were trained


class OfABase(Protocol):
    """What is compared of an adapter: its base model's name and record, if known, and (m, n) of its layers."""

    @property
    def base_model(self) -> str | None: ...
    @property
    def base(self) -> dict[str, str] | None: ...
    @property
    def shapes(self) -> dict[str, tuple[int, int]]: ...


def is_same_name(one: str, other: str) -> bool:
    """Whether two names may be of one model; two folders that are here must be the same."""
    if is_folder(one) and is_folder(other):
        return Path(one).resolve() == Path(other).resolve()
    return _last_part(one) == _last_part(other)


def _last_part(name: str) -> str:
    parts = Path(name).parts or ("",)
    cached = [part.rpartition("--")[2] for part in parts if part.startswith("models--")]  # the hub's cache
    return _QUANTISED.sub("", (cached or parts)[-1].casefold())


def names_of_base(adapters: Iterable[OfABase], base: nn.Module | None) -> tuple[str | None, str | None]:
    """The name to give the base model; and the name that most adapters give it, if the given model has another."""
    named, own = Counter(one.base_model for one in adapters if one.base_model), _own_name(base)
    usual = next((name for name, _ in named.most_common(1)), None)
    if usual and own and not is_same_name(usual, own):
        return own, usual
    return usual or own, None


def _own_name(base: nn.Module | None) -> str | None:
    return getattr(base, "name_or_path", None) or None  # what PEFT records


def other_bases(adapters: Mapping[str, OfABase], base: nn.Module | None) -> dict[str, str]:
    """The adapters of another base model than the given one, or than the others, with the reason."""
    usual, of_whom = _usual_name([one.base_model for one in adapters.values() if one.base_model], base)
    known = dict(layers_of(base).shapes) if base is not None else dict[str, tuple[int, int]]()
    samples = samples_of(base, known) if base is not None else {}
    records: dict[str, Mapping[str, str]] = {}
    found: dict[str, str] = {}
    for name, one in adapters.items():
        if usual is not None and one.base_model and not is_same_name(one.base_model, usual):
            found[name] = f"it names the base model {one.base_model}, and {of_whom} {usual}"
        elif base is not None:
            reason = _other_shape(one.shapes, known, is_whole=True)
            if reason is None and one.base is not None:
                odd = differing_layer(one.base, {layer: samples[layer] for layer in one.shapes})
                reason = None if odd is None else f"the weight of layer {odd!r} is another one there"
            if reason is not None:
                found[name] = reason
        elif (reason := _other_shape(one.shapes, known, is_whole=False)) is not None:
            found[name] = reason
        else:
            own = {} if one.base is None else split_record(one.base, one.shapes)
            if any(differs(own[layer], records[layer]) for layer in own.keys() & records.keys()):
                found[name] = "the weights of its base model are other ones than those of an earlier frozen core"
                continue
            known = {**one.shapes, **known}
            records = {**own, **records}
    return found


def _usual_name(names: list[str], base: nn.Module | None) -> tuple[str | None, str]:
    """The name to compare with: the given model's if an adapter has it, else the commonest."""
    own, distinct = _own_name(base), Counter(names)
    if own and any(is_same_name(name, own) for name in distinct):
        return own, "the one given is"
    shares = {name: sum(n for other, n in distinct.items() if is_same_name(name, other)) for name in distinct}
    return max(shares, key=shares.__getitem__, default=None), "most of the others"


def _other_shape(
    shapes: Mapping[str, tuple[int, int]], known: Mapping[str, tuple[int, int]], *, is_whole: bool
) -> str | None:
    """How layers differ from those known; a layer that is not known is an error if these are all of the model."""
    for layer, shape in shapes.items():
        there = known.get(layer)
        if there != shape and (is_whole or there is not None):
            size = f"{there[0]} x {there[1]}" if there else "missing"
            return f"its layer {layer!r} is {shape[0]} x {shape[1]}, which is {size} in the base model"
    unknown = sorted(shapes.keys() - known.keys())
    endings = {part: layer for layer in known for part in _endings(layer)} if unknown else {}
    for layer in unknown:
        longer = endings.get(layer)
        shorter = next((part for part in _endings(layer) if part in known), None)
        if (other := longer or shorter) is not None and other not in shapes:
            return f"its layer {layer!r} is {other!r} in another, as if one of them was saved from a part of the model"
    return None


def _endings(layer: str) -> Iterable[str]:
    parts = layer.split(".")
    return (".".join(parts[i:]) for i in range(1, len(parts)))


def record_of_base(
    adapters: Iterable[OfABase], layers: Mapping[str, tuple[int, int]], base: nn.Module | None
) -> dict[str, str] | None:
    """Some values of the base model's weights: from the model, or from adapters that know them for all layers."""
    if base is not None:
        return record_base(samples_of(base, layers))
    records: dict[str, Mapping[str, str]] = {}
    for one in adapters:
        records = {**({} if one.base is None else split_record(one.base, one.shapes)), **records}
    return join_records(records) if records.keys() == layers.keys() else None
