"""How the configuration of an adapter is saved and read: whole or not at all, checked with what lies beside it."""

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

from frozencore.adapter.saved_names import layers_in, with_layer_names
from frozencore.adapter.seal.card import CARD_FILE, write_model_card
from frozencore.adapter.seal.integrity import ROUNDS_FORMAT, require_loadable, seal_tensors
from frozencore.adapter.seal.written import holds_no_basis, seal_file
from frozencore.adapter.uncalibrated import warn_of_uncalibrated
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.files.adapter_folder import CONFIG_FILE, PEFT_TYPE, WEIGHTS_FILE, read_config
from frozencore.words import one_line

WAY_OUT_OF_EXPRESSIONS = (
    "Download the whole adapter and load its folder; if that says the same, write the layers' full names into "
    f"{CONFIG_FILE} in its place."
)


class SavedConfig(PeftConfig):
    """What :class:`frozencore.FrozenCoreConfig` does in a folder; what it says is its own."""

    if TYPE_CHECKING:
        seal: dict[str, Any] | None
        basis: str | None
        basis_id: str | None
        rank_budget: int | str | None
        rounds: int
        _seal_to_write: dict[str, Any] | None
        _folder: Path | None
        written_card: str | None

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, subfolder: str | None = None, **kwargs: Any
    ) -> PeftConfig:
        """As PEFT does, after a look at the whole folder where it is a local one.

        Raises:
            ArtifactError: The adapter is damaged, changed since it was saved, or a pickle.
        """
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
            reason = one_line(error, 200)
            raise ArtifactError(
                f"{folder / CONFIG_FILE} holds a value of a wrong type ({reason}). Save or download it again."
            ) from error

    @classmethod
    def from_json_file(cls, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        """As PEFT does, without what is not the adapter's to say, and with the names of layers for expressions.

        Raises:
            ArtifactError: An expression stands where the weights beside the file do not give the names.
        """
        values = super().from_json_file(path_json_file, **kwargs)
        values = {name: value for name, value in values.items() if name != "allow_other_base"}
        if values.get("peft_type") != PEFT_TYPE:
            return values
        folder = Path(path_json_file).parent
        cls.require_types(folder, values)
        return with_layer_names(
            str(folder), values, lambda: layers_in(folder, values.get("basis_id")), WAY_OUT_OF_EXPRESSIONS
        )

    @classmethod
    def require_types(cls, folder: Path, values: Mapping[str, Any]) -> None:
        """Refuse options of a file that are not of their type: PEFT and we would stumble over them much later.

        Raises:
            ArtifactError: The first of them.
        """
        for name, wanted in get_type_hints(cls).items():
            try:
                if name in values:
                    TypeAdapter(wanted).validate_json(json.dumps(values[name]), strict=True)
            except ValidationError as error:
                raise ArtifactError(
                    f"{folder / CONFIG_FILE} holds a value of a wrong type "
                    f"({name}: {error.errors()[0]['msg'].lower()}). Save or download it again."
                ) from error

    def take_seal(self) -> dict[str, Any]:
        """What the file said of the weights beside it; said once, since other weights may be loaded later."""
        seal, self.seal = self.seal, None
        return seal or {}

    def prepare_seal(self, tensors: Mapping[str, Tensor], base: Mapping[str, str] | None) -> None:
        """Note what the tensors are that are about to be saved, and the base model they were made on, unless a basis
        that has a name says it."""
        self._seal_to_write = {**seal_tensors(tensors), "base": None if base is None else dict(base)}
        if self.rounds > 1:
            self._seal_to_write["format"] = ROUNDS_FORMAT

    def to_dict(self) -> dict[str, Any]:
        """What is saved: as PEFT does, with sets in order and the note that the bases are in the file beside it."""
        saved = {**super().to_dict(), "load_bases": True, "seal": self._seal_to_write or self.seal}
        del saved["allow_other_base"]  # whoever loads an adapter says so, not the adapter
        unsaid = {"basis", "basis_revision", "basis_id"} if self.basis_id is None else set()
        unsaid |= {"rank_budget"} if self.rank_budget is None else set()
        unsaid |= {"rounds"} if self.rounds == 1 else set()
        saved = {name: value for name, value in saved.items() if name not in unsaid}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in saved.items()}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """As PEFT does, but whole or not at all, with the hash of the weights that were written before it.

        Then fills in the card that PEFT has left empty, where there is one. Warns if the weights hold no basis: an
        adapter that was never calibrated.
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
            self.written_card = (folder / CARD_FILE).read_text(encoding="utf-8")
