"""The folder of an adapter: one reader and one writer of its two files, and the checksum that binds them.

    adapter_model.safetensors   the tensors (:mod:`frozencore.adapter.saved.tensors`)
    adapter_config.json         the configuration, with

        tensors_sha256   the hash of all tensors with their names
        base_record      some values of the base model's weights (:mod:`frozencore.adapter.saved.base_record`)
        checksum         the hash of every value that changes what is computed, the two above included

The basis and the base model of an adapter of cores alone are in the named basis. The checksum is found when a
configuration is read, whatever reads it. The hash of the tensors is compared when a local folder is read, and before
the first tensors enter a model, also from a hub id. PEFT loads tensors alone onto a name that the model has (as
``Trainer`` resumes), so scales and the record of the base model are among them and are compared. transformers' own
``model.load_adapter`` checks the configuration only, and reports these tensors as unexpected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from frozencore.adapter.saved.card import CARD_FILE, at_place, place_of
from frozencore.adapter.saved.tensors import (
    hash_tensors,
    refuse_foreign,
    require_finite,
    require_modules,
    require_sound,
)
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import (
    CONFIG_FILE,
    PEFT_TYPE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    damaged,
    missing,
    read_config,
)
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.fingerprint import fingerprint_options
from frozencore.text import one_line

NOT_COMPUTED = frozenset(
    {"auto_mapping", "base_model_name_or_path", "basis", "basis_revision", "checksum", "inference_mode", "peft_type",
     "peft_version", "revision", "task_type"}
)  # fmt: skip
"""The values that do not change what an adapter computes: they may be edited."""


def checksum_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of the values of a configuration that change what is computed."""
    return fingerprint_options({name: value for name, value in values.items() if name not in NOT_COMPUTED})


def require_checksum(origin: str, values: Mapping[str, Any]) -> None:
    """Refuse a configuration whose values are not those that were saved."""
    try:
        fits = values.get("checksum") == checksum_of(values)
    except ValueError:  # NaN
        fits = False
    if not fits:
        raise ArtifactError(
            f"The values in {CONFIG_FILE} of {origin} are not those that were saved: their checksum differs. They were "
            "changed or damaged. Save or download the adapter again."
        )


def require_tensors(origin: str, recorded: object, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors whose hash is not the recorded one; None is not compared."""
    if recorded is not None and (hashed := hash_tensors(tensors)) != recorded:
        raise ArtifactError(
            f"The tensors of {origin} are not those that were saved (hash {hashed[:12]}, recorded "
            f"{str(recorded)[:12]!r}): changed, damaged, or just being written. Try again, or download it again."
        )


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the configuration and the tensors of an adapter of any PEFT method.

    Raises:
        ArtifactError: A file is missing or damaged, or a tensor of another method is not finite; a frozen core is a
            pickle.
    """
    values = read_config(folder)
    if values.get("peft_type") == PEFT_TYPE and not (folder / WEIGHTS_FILE).is_file():
        raise ArtifactError(missing(folder, WEIGHTS_FILE))
    if values.get("peft_type") != PEFT_TYPE:
        tensors = read_weights(folder)
        require_finite(str(folder), tensors)
        return values, tensors
    try:
        return values, load((folder / WEIGHTS_FILE).read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise damaged(folder, error) from error


def weights_file(folder: Path) -> Path:
    """The file with the tensors of an adapter; raises ``ArtifactError`` if there is none."""
    for name in (WEIGHTS_FILE, PICKLE_FILE):
        if (folder / name).is_file():
            return folder / name
    raise ArtifactError(missing(folder, WEIGHTS_FILE))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of an adapter of any PEFT method: safetensors, mapped, or tensors alone of a pickle.

    Raises:
        ArtifactError: There is no file, or it is damaged or holds more than tensors.
    """
    file = weights_file(folder)
    try:
        if file.name == WEIGHTS_FILE:
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds for a damaged file and for one of more than tensors
        raise damaged(folder, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(X, Tensor) for X in tensors.values()):
        raise ArtifactError(f"{file} holds more than tensors by name. Save the adapter with save_pretrained.")
    return tensors


@dataclass(frozen=True)
class SavedAdapter:
    """The content of a folder with a frozen core.

    Attributes:
        origin: The folder, for errors.
        values: The values of ``adapter_config.json``.
        tensors: The tensors by their names in the file.
    """

    origin: str
    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> SavedAdapter:
        """Read a folder, and check all that can be checked of its tensors without its basis and its base model.

        The values are checked when they become a configuration (``FrozenCoreConfig.of_file``).

        Raises:
            ArtifactError: A file is missing or damaged, or a tensor is not what was saved or belongs to no adapter.
        """
        values, tensors = read_files(folder)
        kind, origin = values.get("peft_type"), str(folder)
        if kind != PEFT_TYPE:
            raise ArtifactError(f"{folder} holds a {one_line(kind, 40)} adapter, not a frozen core. Read it with PEFT.")
        modules, tokens = values.get("modules_to_save"), values.get("trainable_token_indices")
        require_modules(origin, modules, tokens, tensors)
        refuse_foreign(origin, modules, tokens, tensors)
        require_sound(origin, tensors, coordinates=values.get("coordinates"), basis_id=values.get("basis_id"))
        require_tensors(origin, values.get("tensors_sha256"), tensors)
        return cls(origin, values, tensors)

    def write(self, out: Path, *, tensors: Mapping[str, Tensor], reads: Path, **changes: Any) -> Path:
        """Write a new folder with other tensors.

        Args:
            reads: The folder that this adapter was read from; its card is copied, with the place of the new folder.
            changes: New values of the configuration; None removes a value.
        """
        values = {**self.values, **changes, "tensors_sha256": hash_tensors(tensors)}
        values = {name: value for name, value in values.items() if value is not None or name not in changes}
        values["checksum"] = checksum_of(values)
        with atomic_folder(out, overwrite=None, reads=reads) as aside:
            save_file({key: X.contiguous() for key, X in tensors.items()}, aside / WEIGHTS_FILE, {"format": "pt"})
            text = json.dumps(values, indent=2, sort_keys=True)  # as PEFT writes it
            (aside / CONFIG_FILE).write_text(text, encoding="utf-8")
            if (reads / CARD_FILE).is_file():
                card = (reads / CARD_FILE).read_text(encoding="utf-8")
                (aside / CARD_FILE).write_text(at_place(card, place_of(aside)), encoding="utf-8")
        return out
