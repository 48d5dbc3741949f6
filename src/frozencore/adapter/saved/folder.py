"""Read and write an adapter folder without a model: a configuration, and the factors of each layer."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.saved.card import CARD_FILE
from frozencore.adapter.saved.config_file import WRITE_NAMES, refuse_expressions, wrong_type
from frozencore.adapter.saved.saved_basis import load_basis
from frozencore.adapter.saved.seal import read_folder, seal_tensors
from frozencore.adapter.saved.tensors import FLAT, Factors, layer_factors, with_factors
from frozencore.constructors import constructor_options
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.files.adapter_folder import CONFIG_FILE, HEADER_FILE, PEFT_TYPE, WEIGHTS_FILE, read_config
from frozencore.files.whole_file import whole_folder
from frozencore.words import one_line


def read_adapter(directory: str | Path) -> tuple[FrozenCoreConfig, dict[str, Factors]]:
    """Read the configuration, and the factors by layer name, of a folder that ``save_pretrained`` wrote."""
    config, tensors = read_tensors(directory)
    return config, layer_factors(str(directory), tensors)


def read_adapter_or_basis(directory: str | Path) -> tuple[FrozenCoreConfig, dict[str, Factors]]:
    """Read an adapter, or a saved basis as an adapter with zero cores."""
    if not (Path(directory) / HEADER_FILE).is_file():
        return read_adapter(directory)
    layers = load_basis(directory).layers
    config = FrozenCoreConfig(basis=str(directory))
    return config, {name: Factors(P, Q, P.new_zeros(P.shape[1], P.shape[1])) for name, (P, Q) in layers.items()}


def read_tensors(
    directory: str | Path, *, basis: str | Path | None = None
) -> tuple[FrozenCoreConfig, dict[str, Tensor]]:
    """Read the configuration, and P, Q, R and trained modules under the names of a file that holds them all.

    Args:
        basis: The basis of an adapter of cores alone, if not in the folder, beside it or where it says.
    """
    directory = Path(directory)
    kind = read_config(directory).get("peft_type")
    if kind != PEFT_TYPE:
        raise ArtifactError(f"{directory} holds a {one_line(kind, 40)} adapter, not a frozen core. Read it with PEFT.")
    values, tensors = read_folder(directory)
    config = config_of(directory, values)
    if FLAT not in tensors:
        return config, tensors
    config._folder, config.basis = directory, config.basis if basis is None else str(basis)
    return config, with_factors(str(directory), tensors, config.find_basis(str(directory)).layers)


def config_of(directory: Path, values: Mapping[str, Any]) -> FrozenCoreConfig:
    """The configuration with the values of a folder's file, checked as values of a stranger."""
    FrozenCoreConfig.require_types(directory, values)
    refuse_expressions(str(directory), values, WRITE_NAMES)
    known = {field.name for field in fields(FrozenCoreConfig)} | constructor_options().keys()
    try:
        return FrozenCoreConfig(**{key: value for key, value in values.items() if key in known})
    except FrozenCoreError:
        raise
    except Exception as error:  # values of any type may reach PEFT's code and ours here
        raise wrong_type(directory, one_line(error, 200)) from error


def write_adapter(
    out: Path, tensors: Mapping[str, Tensor], *, like: Path, changes: Mapping[str, Any] | None = None
) -> Path:
    """Write a new adapter folder with the configuration and the card of another.

    Args:
        tensors: The tensors by their names in an adapter file.
        like: The folder of the other adapter.
        changes: New values of the configuration; None removes a value. ``base`` is the seal's record of the base model.
    """
    values = read_config(like)
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
