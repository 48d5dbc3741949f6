"""Save and read the configuration of an adapter, checked with the weights beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_type_hints

from peft import PeftConfig
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from frozencore.adapter.config_names import is_searched, plain_key
from frozencore.adapter.saved.card import CARD_FILE, write_model_card
from frozencore.adapter.saved.seal import refuse_gone, require_loadable, seal_file, seal_tensors
from frozencore.adapter.saved.tensors import holds_no_basis, warn_of_uncalibrated
from frozencore.constructors import constructor_options
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.files.adapter_folder import CONFIG_FILE, PEFT_TYPE, WEIGHTS_FILE, read_config
from frozencore.words import one_line

NOT_READ = ("allow_other_base", "rank_budget")  # the caller's own, and an option whose ranks rank_pattern holds
WRITE_NAMES = f"Write the layers' full names into {CONFIG_FILE} in its place."


class SavedConfig(PeftConfig):
    """The methods of :class:`frozencore.FrozenCoreConfig` that read and write folders."""

    if TYPE_CHECKING:
        seal: dict[str, Any] | None
        basis: str | None
        basis_id: str | None
        own_options: dict[str, Any]
        _seal_to_write: dict[str, Any] | None
        _folder: Path | None
        awaits_file: bool

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, subfolder: str | None = None, **kwargs: Any
    ) -> PeftConfig:
        """Read a configuration as PEFT does; a local folder is checked as a whole first."""
        folder = Path(pretrained_model_name_or_path, subfolder or "")
        ours = (folder / CONFIG_FILE).exists() and read_config(folder).get("peft_type") == PEFT_TYPE
        if ours:
            require_loadable(folder)
        try:
            config = super().from_pretrained(str(pretrained_model_name_or_path), subfolder=subfolder, **kwargs)
            if isinstance(config, SavedConfig) and config.basis_id is not None:
                config._folder = folder if ours else None
                config.basis = str(kwargs.get("basis") or config.basis or "") or None  # PEFT prefers the file's
            return config
        except (TypeError, AttributeError, KeyError, ValueError, ArithmeticError) as error:
            if isinstance(error, FrozenCoreError) or not ours:
                raise
            raise wrong_type(folder, one_line(error, 200)) from error

    @classmethod
    def from_json_file(cls, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        """Read the values of a file as PEFT does, without those that a file may not set."""
        values = super().from_json_file(path_json_file, **kwargs)
        if values.get("peft_type") == PEFT_TYPE:
            refuse_gone(str(Path(path_json_file).parent), values)
            values = {name: value for name, value in values.items() if name not in NOT_READ}
            cls.require_types(Path(path_json_file).parent, values)
            refuse_expressions(str(Path(path_json_file).parent), values, WRITE_NAMES)
        return values

    @classmethod
    def require_types(cls, folder: Path, values: Mapping[str, Any]) -> None:
        """Refuse values that do not have their field's type; PEFT would fail on them much later."""
        for name, wanted in get_type_hints(cls).items():
            try:
                if name in values:
                    TypeAdapter(wanted).validate_json(json.dumps(values[name]), strict=True)
            except ValidationError as error:
                raise wrong_type(folder, f"{name}: {error.errors()[0]['msg'].lower()}") from error

    def take_seal(self) -> dict[str, Any]:
        """Return the file's seal once, because other weights may be loaded later."""
        seal, self.seal, self.awaits_file = self.seal, None, False
        return seal or {}

    def prepare_seal(self, tensors: Mapping[str, Tensor], base: Mapping[str, str] | None) -> None:
        """Record the hashes of the tensors to save, and the base model that they belong to."""
        self._seal_to_write = {**seal_tensors(tensors), "base": None if base is None else dict(base)}

    def to_dict(self) -> dict[str, Any]:
        """The values of the file: PEFT's, with sorted sets, flat options, and a mark that the bases are saved too."""
        saved = {**super().to_dict(), "load_bases": True, "seal": self._seal_to_write or self.seal}
        options = {name: saved.pop(name, option.default) for name, option in constructor_options().items()}
        saved |= options | saved.pop("own_options")
        unsaid = {"allow_other_base"}  # set by the caller who loads the adapter, not by the adapter
        unsaid |= {"basis", "basis_revision", "basis_id"} if self.basis_id is None else set()
        return {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in saved.items()
            if name not in unsaid
        }

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the file as PEFT does, but atomically, with the hash of the weights, which are written first.

        An empty card of PEFT is filled in. Warns of an adapter that was never calibrated.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise AssertionError(f"Provided path ({folder}) should be a directory, not a file")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = seal_file(folder / WEIGHTS_FILE, self._seal_to_write)
        with TemporaryDirectory(prefix=f".{CONFIG_FILE}.", dir=folder) as aside:
            super().save_pretrained(aside, **kwargs)
            os.replace(Path(aside) / CONFIG_FILE, folder / CONFIG_FILE)
        if holds_no_basis(tensors):
            warn_of_uncalibrated(f"The adapter saved in {save_directory}", "and save it again")
        if (folder / CARD_FILE).exists():
            write_model_card(save_directory)


def refuse_expressions(origin: str, values: Mapping[str, Any], way_out: str) -> None:
    """Refuse saved regular expressions in place of layer names: one from a stranger could take any time."""
    odd: list[tuple[str, Any]] = [
        (field, values[field]) for field in ("target_modules", "exclude_modules") if is_searched(values.get(field))
    ]
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = values.get(field)
        keys = pattern if isinstance(pattern, dict) else ()  # another type is refused by the configuration
        odd += [(field, key) for key in keys if isinstance(key, str) and plain_key(key) is None]
    if odd:
        field, expression = odd[0]
        raise ArtifactError(
            f"A saved adapter names its layers, but {field} of {origin} holds the expression "
            f"{json.dumps(expression)[:80]}, which could take any time to search. {way_out}"
        )


def wrong_type(folder: Path, reason: str) -> ArtifactError:
    """The error for a configuration with a value of a wrong type."""
    return ArtifactError(f"{folder / CONFIG_FILE} holds a value of a wrong type ({reason}). Save or download it again.")
