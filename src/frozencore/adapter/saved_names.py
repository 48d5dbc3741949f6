"""The layers that a saved adapter or basis names. Whoever wrote it may be a stranger, so names are only compared.

Adapters saved by earlier versions may hold the expression that their author gave. Their weights name every layer, so
these names take its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from frozencore.adapter.layer_names import is_all_linear, is_expression, plain_key
from frozencore.adapter.seal.factors import BASE, PREFIX
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import HEADER_FILE, WEIGHTS_FILE, basis_header, places_of_a_basis

LARGEST_HEADER = 2**24


def with_layer_names(
    origin: str, values: Mapping[str, Any], layers: Callable[[], Collection[str]], way_out: str
) -> dict[str, Any]:
    """The values of a configuration, with names in the place of an expression that says which layers are adapted.

    Args:
        layers: Gives the names of the layers that the weights hold; empty where they are not at hand.
        way_out: What to do about an expression that names cannot replace.

    Raises:
        ArtifactError: There is such an expression.
    """
    found = dict(values)
    if any(_is_searched(found.get(field)) for field in ("target_modules", "exclude_modules")):
        names = layers()
        if not names:
            field = "target_modules" if _is_searched(found.get("target_modules")) else "exclude_modules"
            raise _refused(origin, field, found[field], way_out)
        found |= {"target_modules": sorted(names), "exclude_modules": None}
        if found.get("layers_to_transform") is not None:
            found |= {"layers_to_transform": None, "layers_pattern": None}
    for field in ("rank_pattern", "alpha_pattern"):
        for key in found.get(field) or ():
            if isinstance(key, str) and plain_key(key) is None:
                raise _refused(origin, field, key, way_out)
    return found


def layers_in(folder: Path, basis_id: object = None) -> frozenset[str]:
    """The layers that the weights in a folder of an adapter name, or the basis beside them; none if neither is there.

    Args:
        basis_id: The basis that an adapter of cores alone names.
    """
    if isinstance(basis_id, str):
        for place in places_of_a_basis(folder):
            header = _header_of(place)
            if header is not None and header["identity"] == basis_id:
                return frozenset(header["scales"])
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="numpy") as file:
            return layers_of_keys(file.keys())
    except (SafetensorError, OSError, ValueError):
        return frozenset()


def layers_of_keys(keys: Collection[str]) -> frozenset[str]:
    """The layers in the names of an adapter's tensors."""
    return frozenset(
        key.removeprefix(BASE).partition(f".{PREFIX}")[0] for key in keys if f".{PREFIX}" in key
    )  # fmt: skip


def _is_searched(value: Any) -> bool:
    return isinstance(value, str) and is_expression(value) and not is_all_linear(value)


def _header_of(place: Path) -> dict[str, Any] | None:
    file = place / HEADER_FILE
    try:
        if not file.is_file() or file.stat().st_size > LARGEST_HEADER:
            return None
        return basis_header(str(place), file.read_text(encoding="utf-8"))
    except (ArtifactError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # it is read again, and refused, where it is used


def _refused(origin: str, field: str, expression: object, way_out: str) -> ArtifactError:
    shown = json.dumps(expression)[:80]
    return ArtifactError(
        f"A saved adapter names its layers, but {field} of {origin} holds the expression {shown}, which could take any "
        f"time to search. {way_out}"
    )
