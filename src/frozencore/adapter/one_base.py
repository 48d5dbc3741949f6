"""Whether adapters are of one base model: by its name, the names and shapes of their layers, and sampled weights.

A LoRA records no weights, and one model has many names: a hub id, a local copy, a path with a slash at its end, a 4-bit
copy. So a path is like a hub id if their last parts are, and layers and weights decide where they are known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from frozencore.adapter.export.base_model import layers_of
from frozencore.adapter.saved.base_record import differing_layer, differs, record_base, samples_of, split_record
from frozencore.files.adapter_folder import is_folder
from frozencore.files.hub import is_hub_id

if TYPE_CHECKING:
    from frozencore.adapter.compress import LowRankAdapter

QUANTISED = re.compile(r"(-unsloth)?-bnb-[48]bit$")
UNSLOTH = "unsloth"  # its hub ids are copies of others' models, on which many LoRAs were trained
NO_NAME = re.compile(r"(merged|final|model|base|output|latest|best|checkpoint)?[-_\d]*")
"""What a folder is called whatever model it holds."""


def is_same_name(one: str, other: str) -> bool:
    """Whether two names may be of one model. Two folders that are here must be the same, two hub ids have one owner."""
    if is_folder(one) and is_folder(other):
        return Path(one).resolve() == Path(other).resolve()
    (owner, name), (other_owner, other_name) = _owner_and_name(one), _owner_and_name(other)
    if one.rstrip("/") == other.rstrip("/"):
        return True
    one_owner = owner == other_owner or not {None, UNSLOTH}.isdisjoint((owner, other_owner))
    return one_owner and name == other_name and not NO_NAME.fullmatch(name)


def _owner_and_name(place: str) -> tuple[str | None, str]:
    """The owner, of a hub id alone, and the last part without what marks a quantised copy; both in lower case."""
    parts = Path(place.casefold()).parts or ("",)
    cached = next((part.split("--")[1:] for part in parts if part.startswith("models--")), None)  # the hub's cache
    if cached is None and is_hub_id(place.rstrip("/")) and not is_folder(place):
        cached = list(parts)
    return (cached[0] if cached else None), QUANTISED.sub("", (cached or parts)[-1])


def names_of_base(adapters: Iterable[LowRankAdapter], base: nn.Module | None) -> tuple[str | None, str | None]:
    """The name to give the base model; and the name that most adapters give it, if the given model has another."""
    named, own = Counter(one.base_model for one in adapters if one.base_model), _own_name(base)
    usual = next((name for name, _ in named.most_common(1)), None)
    if usual is None or own is None:
        return usual or own, None
    if not is_same_name(usual, own):
        return own, usual
    plain = (name for name in (own, usual) if _owner_and_name(name)[0] and not QUANTISED.search(name.casefold()))
    return next(plain, own), None


def _own_name(base: nn.Module | None) -> str | None:
    return getattr(base, "name_or_path", None) or None  # what PEFT records


def other_bases(adapters: Mapping[str, LowRankAdapter], base: nn.Module | None) -> dict[str, str]:
    """The adapters of another base model than the given one or than earlier ones, with the reason.

    Names are compared with the given model's if one adapter has that, else with the commonest.
    """
    usual, of_whom = _usual_name([one.base_model for one in adapters.values() if one.base_model], base)
    known = dict(layers_of(base).shapes) if base is not None else dict[str, tuple[int, int]]()
    samples = samples_of(base, known) if base is not None else {}
    records: dict[str, Mapping[str, str]] = {}
    here, revision = None, None
    found: dict[str, str] = {}
    for name, one in adapters.items():
        folder = Path(one.base_model).resolve() if one.base_model and is_folder(one.base_model) else None
        own = {} if one.base is None else split_record(one.base, one.shapes)
        if usual is not None and one.base_model and not is_same_name(one.base_model, usual):
            found[name] = f"it names the base model {one.base_model}, and {of_whom} {usual}"
        elif None not in (here, folder) and here != folder:
            found[name] = f"it names the base model {one.base_model}, and an earlier one {here}"
        elif None not in (revision, one.revision) and revision != one.revision:
            found[name] = f"it names revision {one.revision} of its base model, and an earlier one {revision}"
        elif reason := _other_layer(one.shapes, known, is_whole=base is not None):
            found[name] = reason
        elif base is not None and one.base is not None:
            odd = differing_layer(one.base, {layer: samples[layer] for layer in one.shapes})
            if odd is not None:
                found[name] = f"the weight of layer {odd!r} is another one there"
        elif any(differs(own[layer], records[layer]) for layer in own.keys() & records.keys()):
            found[name] = "the weights of its base model are other ones than those of an earlier frozen core"
        if name not in found:
            here, revision = here or folder, revision or one.revision
            if base is None:
                known, records = {**one.shapes, **known}, {**own, **records}
    return found


def _usual_name(names: list[str], base: nn.Module | None) -> tuple[str | None, str]:
    own, distinct = _own_name(base), Counter(names)
    if own and any(is_same_name(name, own) for name in distinct):
        return own, "the one given is"
    shares = {name: sum(n for other, n in distinct.items() if is_same_name(name, other)) for name in distinct}
    return max(shares, key=shares.__getitem__, default=None), "most of the others"


def _other_layer(
    shapes: Mapping[str, tuple[int, int]], known: Mapping[str, tuple[int, int]], *, is_whole: bool
) -> str | None:
    """How layers differ from those known; a layer that is not known is an error if these are all of the model."""
    for layer, shape in shapes.items():
        there = known.get(layer)
        if there != shape and (is_whole or there is not None):
            size = f"{there[0]} x {there[1]}" if there else "missing"
            return f"its layer {layer!r} is {shape[0]} x {shape[1]}, which is {size} in the base model"
    if is_whole:
        return None
    stacks, theirs = ({stack for layer in layers if (stack := _stack(layer))} for layers in (shapes, known))
    for stack, other in product(sorted(stacks - theirs), sorted(theirs - stacks)):
        if f".{other}".endswith(f".{stack}") or f".{stack}".endswith(f".{other}"):
            where = f"its layers are in {stack!r}, and an earlier one's in {other!r}"
            return f"{where}: one of them was saved from a part of the model"
    return None


def _stack(layer: str) -> str | None:
    """The module that numbers its layers, as ``model.layers``."""
    found = re.match(r"(.+?)\.\d+\.", layer)
    return found and found[1]


def record_of_base(
    adapters: Iterable[LowRankAdapter], layers: Mapping[str, tuple[int, int]], base: nn.Module | None
) -> dict[str, str] | None:
    """Some values of the base model's weights: from the model, or from an adapter that has all layers."""
    if base is not None:
        return record_base(samples_of(base, layers))
    records = (one.base for one in adapters if one.shapes.keys() == layers.keys())
    return next((record for record in records if record is not None), None)
