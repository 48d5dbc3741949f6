"""The configuration of a frozen-core adapter: the fields of ``FrozenCoreConfig``, their checks, and the saved file."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from peft import PeftConfig

from frozencore.adapter.basis import Basis, basis_beside, find_basis, read_header
from frozencore.adapter.card import num_tokens, write_model_card
from frozencore.adapter.named_layers import key_for, require_names
from frozencore.constructors import (
    CONSTRUCTORS,
    BasisOptions,
    Constructor,
    EvaOptions,
    FCCAOptions,
    FiLoRAOptions,
    SignGradOptions,
    check_unused_options,
    constructor_options,
    find_constructor,
)
from frozencore.constructors.constructor import AUTO_ALPHA, ScaleOptions
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import PEFT_TYPE, folder_of, is_folder, missing
from frozencore.files.atomic_write import allow_as_umask
from frozencore.files.names import CARD_FILE, CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE
from frozencore.maths.basis import LayerBasis
from frozencore.maths.moments import MomentName
from frozencore.options import check_options, options_of
from frozencore.text import nearest_name, unknown_name

INSTEAD_OF_LORA: Mapping[str, str] = {
    "lora_alpha": "the scale is alpha / r (16 / r by default, 1 with alpha=None): give alpha instead",
    "use_rslora": "the scale is alpha / r: choose alpha",
    "lora_dropout": "a core is trained without dropout: leave it out",
    "init_lora_weights": "constructor chooses the bases (fcca, eva, ...), and cores start at zero: give constructor",
    "use_dora": "there are no magnitudes beside a core: leave it out",
    "bias": "only cores are trained: leave it out, or name modules in modules_to_save",
    "lora_bias": "a core has no bias: leave it out",
    "fan_in_fan_out": "the layout of a weight is read from its layer: leave it out",
    "eva_config": "constructor='eva' and its options are fields of FrozenCoreConfig: give these instead",
    "corda_config": "constructor='fcca' reads inputs and output errors: give constructor and its options instead",
    "loftq_config": "bases are computed of the weights as they are: quantise the model when it is loaded",
}
"""What to do instead of each option of ``LoraConfig``."""
USUAL_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("method", "init", "initialization"), "constructor"),
    **dict.fromkeys(("rank", "lora_r", "r_core"), "r"),
    **dict.fromkeys(("targets", "target", "modules", "lora_target_modules"), "target_modules"),
    **dict.fromkeys(("scale", "scaling"), "alpha"),
}
"""frozencore's names of options that other libraries call differently."""


class ForeignNameError(ConfigError, TypeError):
    """An unknown keyword argument of a configuration. Python raises a ``TypeError`` for it, which PEFT catches."""


def refuse_foreign_names(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse keyword arguments that ``FrozenCoreConfig`` does not have, and name the right one."""
    for name in (name for name in given if name not in known):
        near = USUAL_NAMES.get(name) or nearest_name(name, known)
        if instead := INSTEAD_OF_LORA.get(name):
            meant = f"It is LoraConfig's: {instead}."
        else:
            meant = f"Give {near} instead." if near else "help(frozencore.FrozenCoreConfig) lists the arguments."
        # PEFT knows these words: it then leaves out fields of a later version's file
        raise ForeignNameError(f"FrozenCoreConfig got an unexpected keyword argument {name!r}. {meant}")


FILLED_IN = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "modules_to_save")
"""The fields that an adapter fills in with the names of a model's layers."""


class FrozenCoreType(str, Enum):  # noqa: UP042 - PEFT formats the type with str(), which StrEnum changes
    """The name of the method for PEFT. PEFT's enum cannot be extended, but accepts a str enum as a member."""

    FROZENCORE = PEFT_TYPE


class _NamesOfOthers:
    """Refuses keyword arguments of ``LoraConfig`` and of other libraries, with the name to give instead."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        refuse_foreign_names(given, [option.name for option in fields(cls)])  # type: ignore[arg-type]
        return super().__new__(cls)


@dataclass
class FrozenCoreConfig(
    _NamesOfOthers, PeftConfig, FCCAOptions, FiLoRAOptions, EvaOptions, SignGradOptions, ScaleOptions
):
    """Configuration of a frozen-core adapter: ``y = (W + s·P R Qᵀ) x`` with only R (r x r) trained.

    The options of the constructors (``r``, ``alpha``, ``damping``, ...) stand with their help in the dataclasses that
    it inherits (``frozencore tune --help-all`` prints them). An option that the chosen constructor does not read is
    refused.

    Args:
        target_modules: Module names, a regular expression, or ``"all-linear"``; by default the attention projections.
        constructor: How P and Q are chosen: a name of :data:`frozencore.CONSTRUCTORS`.
        rank_pattern: Ranks of layers whose name matches a key; a layer of rank 0 is not adapted.
        alpha_pattern: Alphas of layers whose name matches a key.
        exclude_modules: As in ``LoraConfig``; so are ``layers_to_transform``, ``layers_pattern``, ``modules_to_save``,
            ``trainable_token_indices`` and ``ensure_weight_tying``.
        init_weights: False draws random cores from torch's global generator. An untrained adapter then changes the
            output, for tests of serving and switching.
        calibration_tokens: Written by ``calibrate``: the number of tokens that the bases were computed from.
        learning_rate: Written by ``calibrate``: the peak learning rate that it proposes, also for other cores on the
            saved basis.
        load_bases: Written by ``save_pretrained``: P and Q are loaded from a file, and not built.
        basis: A saved basis to use: the folder of :func:`frozencore.save_basis`, or a hub id (with
            ``basis_revision``). It determines rank, targets, scale and constructor, and the adapter is saved as a core.
        basis_id: Written by ``save_pretrained``: the id of the basis that the core belongs to.
        base_record: Written by ``save_pretrained``: some values of the base model, if P and Q are in the adapter's
            file.
        allow_other_base: Load onto a base model with other weights than the adapter's. Never saved:
            ``PeftModel.from_pretrained(base, folder, allow_other_base=True)``.
        constructor_options: Options of a registered constructor by name (:func:`frozencore.register_constructor`).
    """

    target_modules: set[str] | list[str] | str | None = None
    exclude_modules: set[str] | list[str] | str | None = None
    constructor: str = "fcca"
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    ensure_weight_tying: bool = False
    init_weights: bool = True
    calibration_tokens: int | None = None
    learning_rate: float | None = None
    load_bases: bool = False
    basis: str | None = None
    basis_revision: str | None = None
    basis_id: str | None = None
    base_record: dict[str, str] | None = None
    allow_other_base: bool = False
    constructor_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.filled: dict[str, tuple[Any, Any]] | None = None
        if self.basis is not None and self.basis_id is None:
            self._take_from_basis(self.basis)
        self.peft_type = FrozenCoreType.FROZENCORE
        for name in ("rank_pattern", "alpha_pattern", "constructor_options"):
            if getattr(self, name) is None:
                setattr(self, name, {})
        if isinstance(self.modules_to_save, str):
            self.modules_to_save = [self.modules_to_save]  # PEFT would take each letter for a name
        for name in ("modules_to_save", "layers_to_transform", "layers_pattern"):
            if isinstance(given := getattr(self, name), tuple | set | range):
                setattr(self, name, sorted(given) if isinstance(given, set) else [*given])
        for name in ("target_modules", "exclude_modules"):
            if isinstance(given := getattr(self, name), list | tuple):
                setattr(self, name, set(given))  # PEFT compares sets
        check_options(self)
        require_names(self)
        find_constructor(self.constructor)
        for name in self.constructor_options:
            if name not in constructor_options():
                raise ConfigError(unknown_name("option of a constructor", name, constructor_options()))
        for alpha in self.alpha_pattern.values():
            options_of(ScaleOptions)["alpha"].validate(alpha)
        if not self.load_bases:  # unread options do not matter if the bases exist
            check_unused_options(self.constructor, {name: self._option(name) for name in constructor_options()})
        adapted = (rank for rank in self.rank_pattern.values() if type(rank) is not int or rank != 0)
        for rank in (self.r, *adapted):
            self.basis_options(rank)  # refuses bad values now instead of during calibration

    def _take_from_basis(self, place: str | Path) -> None:
        """Take rank, targets, scale and constructor from a saved basis if they are at their defaults."""
        header = read_header(place, self.basis_revision)
        defaults = {each.name: each.default for each in fields(self)}
        for name, value in header.options.items():
            given = getattr(self, name)
            if given != {} and given != defaults[name] and _plain(given) != value:
                raise ConfigError(
                    f"The basis in {place} has {name}={value!r:.100}, but {_plain(given)!r:.100} was given. "
                    f"Leave {name} out."
                )
            setattr(self, name, value)
        self.basis, self.basis_id = _found_from_anywhere(place), header.id

    def require_core_alone(self, origin: str, reason: str) -> None:
        """Refuse an adapter that trains anything besides cores.

        Args:
            origin: The adapter.
            reason: The rule, as the beginning of a sentence.
        """
        more = [*(self.modules_to_save or ()), *(["token embeddings"] if self.trainable_token_indices else [])]
        if more:
            raise ConfigError(
                f"{reason}, but {origin} trains other modules too ({', '.join(more)}). Leave out modules_to_save and "
                "trainable_token_indices, or merge the adapter into its model."
            )

    @property
    def constructor_entry(self) -> Constructor[Any]:
        """The constructor's entry in the table."""
        return find_constructor(self.constructor)

    @property
    def needs_calibration(self) -> bool:
        """Return whether P and Q are made from data, so that ``frozencore.calibrate`` must run before training."""
        return self.basis is None and bool(self.needs)

    @property
    def needs(self) -> frozenset[MomentName]:
        """The moments that the constructor reads."""
        return self.constructor_entry.needs(self.basis_options())

    def basis_options(self, rank: int | None = None) -> BasisOptions:
        """The options of the constructor, checked; ``rank`` overrides r for one layer."""
        options = self.constructor_entry.options
        given = {name: self._option(name) for name in options_of(options)}
        return options(**{**given, "r": self.r if rank is None else rank})

    def _option(self, name: str) -> Any:
        """The value of an option of any constructor."""
        if name in options_of(FrozenCoreConfig):
            return getattr(self, name)
        return self.constructor_options.get(name, constructor_options()[name].default)

    def rank_of(self, layer: str) -> int:
        """The configured rank of a layer; 0 for a layer that is not adapted."""
        key = key_for(self.rank_pattern, layer)
        return self.r if key is None else self.rank_pattern[key]

    def scale_of(self, layer: str) -> float:
        """The scale s of a layer: alpha over the configured rank, or 1."""
        key = key_for(self.alpha_pattern, layer)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        if alpha is None:
            return 1.0
        return (AUTO_ALPHA if alpha == "auto" else alpha) / self.rank_of(layer)

    def find_basis(self, origin: str) -> Basis:
        """Read the basis that is named."""
        assert self.basis_id is not None
        return find_basis(origin, self.basis_id, self.basis, self.basis_revision)

    def make_basis(
        self, layers: Mapping[str, LayerBasis], *, base: Mapping[str, str] | None, calibrated_on: str | None = None
    ) -> Basis:
        """P, Q and s of each layer as a basis, with the options that made them."""
        known = _options_of_basis()
        return Basis(
            layers,
            options={name: value for name, value in self.to_dict().items() if name in known},
            base=base,
            base_model=self.base_model_name_or_path,
            calibrated_on=calibrated_on or num_tokens(self.calibration_tokens),
        )

    def attach_basis_id(self, basis_id: str | None, place: str | None = None, revision: str | None = None) -> None:
        """Record the basis of the adapter; without a place, its P and Q are saved beside the core."""
        self.basis = None if place is None else _found_from_anywhere(place)
        self.basis_revision, self.basis_id, self.base_record = revision, basis_id, None
        self.load_bases = False

    def for_model(self) -> FrozenCoreConfig:
        """The configuration for one more model: itself, or a copy if a model has it already.

        A model keeps the object that it is given, as in PEFT, and fills in the names of its layers; so does a model
        into which an adapter is loaded that does not train. The copy has the names that the user gave, and nothing of
        the first model's calibration.
        """
        if self.filled is None or self.inference_mode:
            return self
        other = copy.deepcopy(self)
        other.filled = None
        for name, (given, value) in self.filled.items():
            if getattr(self, name) == value:
                setattr(other, name, given)
        if self.basis is None and not self.load_bases:
            other.calibration_tokens = other.learning_rate = None
        return other

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, subfolder: str | None = None, **kwargs: Any
    ) -> PeftConfig:
        """Read a configuration as PEFT does, find a basis beside it, and refuse pickled weights."""
        folder = Path(pretrained_model_name_or_path, subfolder or "")
        if (folder / PICKLE_FILE).exists() and not (folder / WEIGHTS_FILE).exists():
            raise ArtifactError(missing(folder, WEIGHTS_FILE))
        config = super().from_pretrained(str(pretrained_model_name_or_path), subfolder=subfolder, **kwargs)
        if isinstance(config, FrozenCoreConfig) and config.basis is not None and config.basis_id is not None:
            if not (basis := kwargs.get("basis")):  # else a hub is not asked for one
                of_adapter = folder_of(
                    str(pretrained_model_name_or_path), kwargs.get("revision"), cache_dir=kwargs.get("cache_dir")
                )
                basis = basis_beside(config.basis_id, of_adapter / (subfolder or "")) or config.basis
            config.basis = _found_from_anywhere(basis)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The values of the file: PEFT's, with sorted sets."""
        saved = {**super().to_dict(), "load_bases": True}
        del saved["allow_other_base"]  # set by the caller who loads the adapter, not by the adapter
        unused = ("basis", "basis_revision", "basis_id", "base_record", "constructor_options")
        absent = {name for name in unused if not saved[name]}
        return {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in saved.items()
            if name not in absent
        }

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the file as PEFT does, but atomically, and fill in PEFT's empty card."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        _require_no_pickle(folder)
        if (folder / WEIGHTS_FILE).is_file():
            allow_as_umask(folder / WEIGHTS_FILE)
        with TemporaryDirectory(prefix=f".{CONFIG_FILE}.", dir=folder) as aside:
            super().save_pretrained(aside, **kwargs)
            os.replace(Path(aside) / CONFIG_FILE, folder / CONFIG_FILE)
        if (folder / CARD_FILE).exists():
            write_model_card(save_directory)


def _found_from_anywhere(basis: str | Path) -> str:
    """The absolute path of a folder; a hub id stays."""
    return str(Path(basis).absolute() if is_folder(basis) else basis)


def _require_no_pickle(folder: Path) -> None:
    """Refuse to go on where PEFT has just written the weights as a pickle, which nothing here opens."""
    pickled, weights = folder / PICKLE_FILE, folder / WEIGHTS_FILE
    if pickled.is_file() and not (weights.is_file() and weights.stat().st_mtime_ns > pickled.stat().st_mtime_ns):
        raise ArtifactError(
            f"Weights are saved as safetensors, but {folder} has newer ones in {PICKLE_FILE}, a pickle, which is never "
            "opened. Save without safe_serialization=False (save_safetensors=False), in a folder without that file."
        )


def _options_of_basis() -> frozenset[str]:
    """The fields that a saved basis records: how P and Q were made, and their layers."""
    other = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "constructor", "alpha",
             "rank_pattern", "alpha_pattern", "calibration_tokens", "learning_rate", "constructor_options")  # fmt: skip
    built_in = (name for row in (FCCAOptions, FiLoRAOptions, EvaOptions) for name in options_of(row))
    return frozenset({*other, *built_in})


def _plain(value: Any) -> Any:
    """Convert a field to its form after a round trip through JSON."""
    return sorted(value) if isinstance(value, set | list) else json.loads(json.dumps(value))


def register_constructor(name: str, row: Constructor[Any]) -> None:
    """Add a basis constructor to the table of this process, which then loads its adapters too.

    Its options are the ``constructor_options`` of :class:`FrozenCoreConfig`, and keys of campaigns and flags of
    ``tune`` where ``frozencore.cli.app.main()`` is called in this process.

    Args:
        row: An instance of a subclass of :class:`frozencore.constructors.Constructor`.

    Raises:
        ConfigError: The name is taken, one of its options has the name of another, or the row is no instance.
    """
    if not isinstance(row, Constructor):
        raise ConfigError(f"A constructor is an instance of a subclass of Constructor, but {row!r:.80} was given.")
    config_fields, known = {each.name for each in fields(FrozenCoreConfig)}, constructor_options()
    added = {key: option for key, option in options_of(row.options).items() if key not in options_of(BasisOptions)}
    taken = [
        key
        for key, option in added.items()
        if (key in config_fields or key in known) and (key not in known or known[key].meaning != option.meaning)
    ]
    if name in CONSTRUCTORS or taken:
        raise ConfigError(
            f"The names of a constructor and its options are new, but {(taken or [name])[0]!r} is taken. Rename it."
        )
    CONSTRUCTORS[name] = row
