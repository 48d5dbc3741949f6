"""A saved adapter read and written as what it is: a configuration and three factors per layer, without a model."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.saved_config import WAY_OUT_OF_EXPRESSIONS
from frozencore.adapter.saved_names import layers_in, with_layer_names
from frozencore.adapter.seal.card import CARD_FILE
from frozencore.adapter.seal.factors import Factors, layer_factors
from frozencore.adapter.seal.flat_cores import FLAT, with_factors
from frozencore.adapter.seal.integrity import read_folder, seal_tensors
from frozencore.adapter.seal.saved_basis import load_basis
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.files.adapter_folder import CONFIG_FILE, HEADER_FILE, PEFT_TYPE, WEIGHTS_FILE, read_config
from frozencore.files.whole_file import whole_folder
from frozencore.words import one_line

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "Factors", "layer_factors", "read_adapter"]


def read_adapter(
    directory: str | Path, *, basis: str | Path | None = None
) -> tuple[FrozenCoreConfig, dict[str, Factors]]:
    """Configuration and factors, by layer name, of a folder that ``save_pretrained`` wrote.

    Args:
        basis: Where the basis of an adapter of cores alone is, if not in the folder, beside it or where it says.

    Raises:
        ArtifactError: Not a folder of ours, damaged, changed since it was saved, or incomplete; or its basis is not
            to be found, or is another.
    """
    config, tensors = read_tensors(directory, basis=basis)
    return config, layer_factors(str(directory), tensors)


def write_adapter(
    out: Path, tensors: Mapping[str, Tensor], *, like: Path, changes: Mapping[str, Any] | None = None
) -> Path:
    """Write a new adapter folder with the configuration and the card of another.

    Args:
        tensors: As an adapter file names them.
        like: The other's folder.
        changes: What is different in its configuration; None takes a value out. ``base`` is what the seal says of the
            base model.

    Raises:
        ArtifactError: The folder is there already, or cannot be written.
    """
    values = _named(like, read_config(like))
    changes = {"base": (values.get("seal") or {}).get("base"), **(changes or {})}
    values |= {name: value for name, value in changes.items() if name != "base"}
    for name in changes:
        if values.get(name, ...) is None:
            del values[name]
    with whole_folder(out, overwrite=None, reads=like) as aside:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, aside / WEIGHTS_FILE, {"format": "pt"})
        seal = {**seal_tensors(tensors), "base": changes["base"]}
        seal["weights_sha256"] = hashlib.sha256((aside / WEIGHTS_FILE).read_bytes()).hexdigest()
        text = json.dumps({**values, "seal": seal}, indent=2, sort_keys=True)  # as PEFT writes it
        (aside / CONFIG_FILE).write_text(text, encoding="utf-8")
        if (like / CARD_FILE).is_file():
            shutil.copyfile(like / CARD_FILE, aside / CARD_FILE)
    return out


def read_adapter_or_basis(directory: str | Path) -> tuple[FrozenCoreConfig, dict[str, Factors]]:
    """As :func:`read_adapter`; of a saved basis, as an adapter on it with cores of zeros."""
    if not (Path(directory) / HEADER_FILE).is_file():
        return read_adapter(directory)
    layers = load_basis(directory).layers
    config = FrozenCoreConfig(basis=str(directory))
    return config, {name: Factors(P, Q, P.new_zeros(P.shape[1], P.shape[1])) for name, (P, Q) in layers.items()}


def read_tensors(
    directory: str | Path, *, basis: str | Path | None = None
) -> tuple[FrozenCoreConfig, dict[str, Tensor]]:
    """As :func:`read_adapter`, with the tensors as a file of all factors names them, trained modules among them."""
    directory = Path(directory)
    kind = read_config(directory).get("peft_type")
    if kind != PEFT_TYPE:
        kind = one_line(kind, 40)
        raise ArtifactError(f"{directory} holds a {kind} adapter, not a frozen core. Read it with PEFT.")
    values, tensors = read_folder(directory)
    FrozenCoreConfig.require_types(directory, values)
    values = _named(directory, values)
    known = {field.name for field in fields(FrozenCoreConfig)}
    try:
        config = FrozenCoreConfig(**{key: value for key, value in values.items() if key in known})
    except FrozenCoreError:
        raise
    except Exception as error:  # PEFT and we iterate, compare and look up what may be of any type here
        raise ArtifactError(
            f"{directory / CONFIG_FILE} holds a value of a wrong type ({one_line(error, 200)}). Save or download it "
            "again."
        ) from error
    if FLAT not in tensors:
        return config, tensors
    config._folder, config.basis = directory, config.basis if basis is None else str(basis)
    return config, with_factors(str(directory), tensors, config.find_basis(str(directory)).layers)


def _named(directory: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration, with names of layers in the place of expressions."""
    names = partial(layers_in, directory, values.get("basis_id"))
    return with_layer_names(str(directory), values, names, WAY_OUT_OF_EXPRESSIONS)
