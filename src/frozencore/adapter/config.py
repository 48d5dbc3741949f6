"""What a user says about a frozen-core adapter, and PEFT's registration of the method."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_type_hints

from peft import PeftConfig
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load
from torch import Tensor

from frozencore.adapter.seal.card import CARD_FILE, write_model_card
from frozencore.adapter.seal.factors import PREFIX
from frozencore.adapter.seal.integrity import (
    CONFIG_FILE,
    PEFT_TYPE,
    WEIGHTS_FILE,
    read_config,
    read_seal,
    require_loadable,
    require_sealed,
    seal_tensors,
)
from frozencore.constructors import CONSTRUCTORS, BasisOptions, Constructor, find_constructor
from frozencore.errors import ArtifactError, ConfigError, FrozenCoreError
from frozencore.maths.whitening import Whitening
from frozencore.one_line import one_line


class FrozenCoreType(str, Enum):  # noqa: UP042 - PEFT formats the type with str(), which StrEnum changes
    """PEFT's own enum of methods is closed; a str enum whose name equals its value passes for a member."""

    FROZENCORE = PEFT_TYPE


@dataclass
class FrozenCoreConfig(PeftConfig):
    """Configuration of a frozen-core adapter: ``y = (W + s·P R Qᵀ) x`` with only R (r x r) trained.

    Args:
        r: Rank; a layer with fewer inputs or outputs gets ``min(r, m, n)``.
        target_modules: Module names, a regular expression, or ``"all-linear"``; by default the attention projections.
        constructor: How P and Q are chosen: ``fcca``, ``rawgrad``, ``filora``, ``milora``, ``lora_xs``, ``vera``,
            ``eva``, ``random`` or ``signgrad``.
        alpha: The scale is ``s = alpha / r``; None means ``s = 1``.
        whiten, fisher, shrinkage, damping: Metric of ``fcca``, see :class:`frozencore.maths.whitening.Whitening`.
        coordinates: ``qr`` (default), ``polar``, or the ablations ``raw`` and ``scaled_raw``.
        svd_method: ``auto``, ``gram``, ``randomized`` or ``full``.
        filora_fisher: ``dense`` eigenvectors or ``diagonal`` coordinate selection.
        eva_center, eva_output: Variants of ``eva``.
        initial_step: With ``signgrad``: start from the core of one sign step of this size; 0 starts from zero.
        seed: Seed of random directions.
        rank_pattern, alpha_pattern: Ranks and alphas of layers whose name matches a key.
        exclude_modules, layers_to_transform, layers_pattern, modules_to_save: As in ``LoraConfig``.
        trainable_token_indices, ensure_weight_tying: As in ``LoraConfig``.
        init_weights: False starts from cores drawn from torch's global generator instead of zero, so that an untrained
            adapter changes the output: for trying out serving and switching, not for training.
        calibration_tokens: Written by ``calibrate``: how many tokens the bases were computed from.
        load_bases: Written by ``save_pretrained``: P and Q are in the file, so none is built.
        seal: Written by ``save_pretrained``: hashes of the weights and some values of the base model, which loading
            checks (:mod:`frozencore.adapter.seal.integrity`).
        allow_other_base: Load onto a base model whose weights are not those that the adapter was made on. Never saved:
            ``PeftModel.from_pretrained(base, folder, allow_other_base=True)``.
    """

    r: int = 16
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    constructor: str = "fcca"
    alpha: float | None = None
    whiten: str = "both"
    fisher: str = "diagonal"
    shrinkage: float = 0.0
    damping: float | list[float] = 1e-3
    coordinates: str = "qr"
    svd_method: str = "auto"
    filora_fisher: str = "dense"
    eva_center: bool = False
    eva_output: str = "weight_times_input"
    initial_step: float = 0.0
    seed: int = 0
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    ensure_weight_tying: bool = False
    init_weights: bool = True
    calibration_tokens: int | None = None
    load_bases: bool = False
    seal: dict[str, Any] | None = None
    allow_other_base: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seal_to_write: dict[str, Any] | None = None
        if self.seal is not None:
            self.seal = read_seal("this configuration", self.seal)
        self.peft_type = FrozenCoreType.FROZENCORE
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)  # type: ignore[assignment]  # PEFT compares sets
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)  # type: ignore[assignment]
        for name in ("rank_pattern", "alpha_pattern"):
            if not isinstance(getattr(self, name), dict):
                raise ConfigError(f"{name} maps layer names to numbers, but {getattr(self, name)!r} came.")
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(self.target_modules, str) and getattr(self, name) is not None:
                raise ConfigError(
                    f"`{name}` cannot be used when `target_modules` is a str. Pass a list of module names, or put the "
                    "layers into the regular expression."
                )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ConfigError(
                "When `layers_pattern` is specified, `layers_to_transform` must also be specified. "
                "It says which of the layers that the pattern counts are adapted."
            )
        if self.initial_step and not self.constructor_entry.initial_core:
            own = ", ".join(repr(name) for name, row in CONSTRUCTORS.items() if row.initial_core)
            raise ConfigError(f"initial_step belongs to the constructor {own}, but {self.constructor!r} came.")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if alpha is not None and not (isinstance(alpha, int | float) and 0 < alpha < float("inf")):
                raise ConfigError(f"alpha must be positive and finite, but {alpha!r} came.")
        for rank in (self.r, *self.rank_pattern.values()):
            self.basis_options(rank)  # refuses bad values now, not in the middle of a calibration

    @property
    def constructor_entry(self) -> Constructor:
        """The row of the constructor table."""
        return find_constructor(self.constructor)

    @property
    def needs_calibration(self) -> bool:
        """Whether P and Q come from data, so that ``frozencore.calibrate`` must run before training."""
        return self.constructor_entry.needs_data(self.basis_options())

    def basis_options(self, rank: int | None = None) -> BasisOptions:
        """The options of the constructors, checked; ``rank`` overrides r for one layer."""
        find_constructor(self.constructor)
        damping = tuple(self.damping) if isinstance(self.damping, list) else self.damping
        return BasisOptions(
            rank=self.r if rank is None else rank,
            whitening=Whitening(
                sides=self.whiten,  # type: ignore[arg-type]  # a user's string, checked there
                fisher=self.fisher,  # type: ignore[arg-type]
                shrinkage=self.shrinkage,
                damping=damping,  # type: ignore[arg-type]
            ),
            coordinates=self.coordinates,  # type: ignore[arg-type]
            svd_method=self.svd_method,  # type: ignore[arg-type]
            filora_fisher=self.filora_fisher,  # type: ignore[arg-type]
            eva_center=self.eva_center,
            eva_output=self.eva_output,  # type: ignore[arg-type]
            seed=self.seed,
        )

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
            require_types(folder, read_config(folder))
        try:
            return super().from_pretrained(str(pretrained_model_name_or_path), subfolder=subfolder, **kwargs)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            if isinstance(error, FrozenCoreError) or not ours:
                raise
            reason = one_line(error, 200)
            raise ArtifactError(
                f"{folder / CONFIG_FILE} holds a value of a wrong type ({reason}). Save or download it again."
            ) from error

    @classmethod
    def from_json_file(cls, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        """As PEFT does, without what is not the adapter's to say."""
        values = super().from_json_file(path_json_file, **kwargs)
        return {name: value for name, value in values.items() if name != "allow_other_base"}

    def take_seal(self) -> dict[str, Any]:
        """What the file said of the weights beside it; said once, since other weights may be loaded later."""
        seal, self.seal = self.seal, None
        return seal or {}

    def prepare_seal(self, tensors: Mapping[str, Tensor], base: Mapping[str, str] | None) -> None:
        """Note what the tensors are that are about to be saved, and the base model they were made on."""
        self._seal_to_write = {**seal_tensors(tensors), "base": None if base is None else dict(base)}

    def to_dict(self) -> dict[str, Any]:
        """What is saved: as PEFT does, with sets in order and the note that the bases are in the file beside it."""
        saved = {**super().to_dict(), "load_bases": True, "seal": self._seal_to_write or self.seal}
        del saved["allow_other_base"]  # whoever loads an adapter says so, not the adapter
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
        tensors = self._seal_file(folder / WEIGHTS_FILE)
        with TemporaryDirectory(prefix=f".{CONFIG_FILE}.", dir=folder) as aside:
            super().save_pretrained(aside, **kwargs)
            os.replace(Path(aside) / CONFIG_FILE, folder / CONFIG_FILE)
        if _holds_no_basis(tensors):
            warnings.warn(
                f"The adapter saved in {save_directory} was never calibrated: its bases are zero and it changes "
                "nothing. Call frozencore.calibrate(model, dataloader) and save it again.",
                stacklevel=3,
            )
        if (folder / CARD_FILE).exists():
            write_model_card(save_directory)

    def _seal_file(self, path: Path) -> dict[str, Tensor]:
        """Add the file's hash to the seal, unless it holds other tensors: those of an adapter about to be replaced."""
        if not path.is_file():
            return {}
        content = path.read_bytes()
        tensors = load(content)
        seal = self._seal_to_write
        if seal is not None:
            seal["weights_sha256"] = None
            try:
                require_sealed(str(path), seal, tensors)
            except ArtifactError:
                return {}
            seal["weights_sha256"] = hashlib.sha256(content).hexdigest()
        return tensors


def require_types(folder: Path, values: Mapping[str, Any]) -> None:
    """Refuse options of a file that are not of their type: PEFT and we would stumble over them much later.

    Raises:
        ArtifactError: The first of them.
    """
    for name, wanted in _types().items():
        try:
            if name in values:
                wanted.validate_python(values[name], strict=True)
        except ValidationError as error:
            raise ArtifactError(
                f"{folder / CONFIG_FILE} holds a value of a wrong type ({name}: {error.errors()[0]['msg'].lower()}). "
                "Save or download it again."
            ) from error


@cache
def _types() -> dict[str, Any]:
    return {name: TypeAdapter(wanted) for name, wanted in get_type_hints(FrozenCoreConfig).items()}


def _holds_no_basis(tensors: Mapping[str, Tensor]) -> bool:
    """Whether factors are still zero; all layers get theirs at once, so one tells."""
    first = next((tensor for key, tensor in tensors.items() if f".{PREFIX}P" in key), None)
    return first is not None and not bool(first.any())
