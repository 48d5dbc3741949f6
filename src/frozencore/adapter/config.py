"""What a user says about a frozen-core adapter, and PEFT's registration of the method."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from frozencore.adapter.config_names import require_names
from frozencore.adapter.option_fields import add_option_fields
from frozencore.adapter.saved_config import SavedConfig
from frozencore.adapter.saved_names import with_layer_names
from frozencore.adapter.seal.saved_basis import SavedBasis, find_basis, read_header
from frozencore.constructors import (
    BasisOptions,
    Constructor,
    EveryOption,
    constructor_options,
    find_constructor,
    refuse_unread,
)
from frozencore.constructors.options import Alpha, RankBudget, ScaleOptions, trained_values
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import LARGEST_FLOAT32, PEFT_TYPE, read_seal
from frozencore.options import options_of, without_lists

MOST_ROUNDS = 1000


class FrozenCoreType(str, Enum):  # noqa: UP042 - PEFT formats the type with str(), which StrEnum changes
    """PEFT's own enum of methods is closed; a str enum whose name equals its value passes for a member."""

    FROZENCORE = PEFT_TYPE


@dataclass
class FrozenCoreConfig(SavedConfig, EveryOption):  # type: ignore[misc]  # frozen it is for type checkers alone
    """Configuration of a frozen-core adapter: ``y = (W + s·P R Qᵀ) x`` with only R (r x r) trained.

    Every option of a constructor is a field too, flat and under its own name (:mod:`frozencore.constructors`); one that
    the chosen constructor does not read is refused.

    Args:
        r: Rank; a layer with fewer inputs or outputs gets ``min(r, m, n)``.
        target_modules: Module names, a regular expression, or ``"all-linear"``; by default the attention projections.
        constructor: How P and Q are chosen: a name of :data:`frozencore.CONSTRUCTORS`.
        alpha: The scale is ``s = alpha / r``; ``"auto"`` is 16, by which one learning rate serves all ranks; None means
            ``s = 1``, the paper's.
        seed: Seed of random directions.
        rank_budget: Trained values of all cores together instead of a rank: a number, or the size of so many as
            float32 (``"150KB"``). ``calibrate`` spends them on the layers where they are worth most and writes what
            each got into ``rank_pattern``; constructors that have no spectrum for that get equal ranks. See
            docs/rank-budget.md.
        rank_pattern: Ranks of layers whose name matches a key; one of rank 0 is not adapted.
        alpha_pattern: Alphas of layers whose name matches a key.
        exclude_modules: As in ``LoraConfig``, and so are ``layers_to_transform``, ``layers_pattern``,
            ``modules_to_save``, ``trainable_token_indices`` and ``ensure_weight_tying``.
        init_weights: False starts from cores drawn from torch's global generator instead of zero, so that an untrained
            adapter changes the output: for trying out serving and switching, not for training.
        calibration_tokens: Written by ``calibrate``: how many tokens the bases were computed from.
        load_bases: Written by ``save_pretrained``: P and Q are in the file, so none is built.
        seal: Written by ``save_pretrained``: hashes of the weights and some values of the base model, which loading
            checks (:mod:`frozencore.adapter.seal.integrity`).
        basis: Use that basis instead of choosing one: the folder of :func:`frozencore.save_basis`, or a hub id (with
            ``basis_revision``). Rank, targets, scale and constructor are the basis's. The adapter is saved as cores
            alone.
        rounds: Written by training that refreshes (:class:`frozencore.Refresh`): how many bases stand side by side in
            P and Q of each layer, each with a core of its own. The layers have rank ``rounds * r``.
        basis_id: Written by ``save_pretrained``: the identity of the basis that the cores belong to.
        allow_other_base: Load onto a base model whose weights are not those that the adapter was made on. Never saved:
            ``PeftModel.from_pretrained(base, folder, allow_other_base=True)``.
    """

    r: int = BasisOptions.rank
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    constructor: str = "fcca"
    alpha: Alpha = ScaleOptions.alpha
    seed: int = BasisOptions.seed
    rank_budget: RankBudget = None
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
    rounds: int = 1
    basis: str | None = None
    basis_revision: str | None = None
    basis_id: str | None = None
    allow_other_base: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seal_to_write: dict[str, Any] | None = None
        self._folder: Path | None = None
        self.written_card: str | None = None  # beside the adapter, when it was last saved
        self.refreshes = False  # set by what refreshes it
        self.expressions: dict[str, tuple[Any, Any]] = {}  # fields with what they said before layers were named
        if self.basis is not None and self.basis_id is None:
            self._take_from_basis(self.basis)
        several = isinstance(self.rounds, int) and 1 < self.rounds <= MOST_ROUNDS and self.basis_id is None
        if self.rounds != 1 and not (several and self.load_bases):
            raise ConfigError(
                f"rounds is written by training that refreshes, but rounds={self.rounds!r:.50} came. Leave it out."
            )
        if self.seal is not None:
            self.seal = read_seal("this configuration", self.seal)
        self.peft_type = FrozenCoreType.FROZENCORE
        require_names(self)
        if isinstance(self.target_modules, list | tuple):
            self.target_modules = set(self.target_modules)  # type: ignore[assignment]  # PEFT compares sets
        if isinstance(self.exclude_modules, list | tuple):
            self.exclude_modules = set(self.exclude_modules)  # type: ignore[assignment]  # these too
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            options_of(FrozenCoreConfig)["alpha"].check(alpha)
            if isinstance(alpha, int | float) and alpha > LARGEST_FLOAT32:
                raise ConfigError("alpha must be a number above 0 that a float32 holds, but a larger one came.")
        find_constructor(self.constructor)
        if not self.load_bases:  # what does not decide bases that are there is of no harm
            refuse_unread(self.constructor, {name: getattr(self, name) for name in constructor_options()})
        adapted = (rank for rank in self.rank_pattern.values() if type(rank) is not int or rank != 0)
        for rank in (self.r, *adapted):
            self.basis_options(rank)  # refuses bad values now, not in the middle of a calibration
        if self.rank_budget is not None:
            self._check_rank_budget()

    def _check_rank_budget(self) -> None:
        self.rank_budget = trained_values(self.rank_budget)
        if self.basis_id is not None and not self.rank_pattern:
            raise ConfigError(f"The basis in {self.basis} has its ranks already. Leave rank_budget out.")
        decided = self.load_bases or self.basis_id is not None
        if not decided and (self.r != BasisOptions.rank or self.rank_pattern):
            given = f"r={self.r}" if self.r != BasisOptions.rank else "rank_pattern"
            raise ConfigError(f"rank_budget chooses the ranks, but {given} came too. Leave one of them out.")

    def _take_from_basis(self, place: str | Path) -> None:
        """Rank, targets, scale and constructor are those of the basis, where they are left at their defaults."""
        if self.load_bases:
            raise ConfigError("The adapter holds a basis of its own: leave basis out, or `frozencore adapter pack` it.")
        header = read_header(place, self.basis_revision)
        options = with_layer_names(
            f"the basis {place}", header["options"], lambda: header["scales"], "Save the basis again."
        )
        known, fields = options_of_basis(), self.__dataclass_fields__
        for name, value in options.items():
            if name not in known:
                raise ArtifactError(
                    f"The basis in {place} has an option {name!r:.50} that this frozencore does not know."
                )
            own = getattr(self, name)
            if own != {} and own != fields[name].default and _plain(own) != value:
                raise ConfigError(
                    f"The basis in {place} has {name}={value!r:.100}, but {_plain(own)!r:.100} came. Leave {name} out."
                )
            setattr(self, name, value)
        if self.initial_step:
            raise ConfigError("initial_step starts from a core that a saved basis does not hold. Leave it out.")
        self.basis, self.basis_id = str(place), header["identity"]

    @property
    def trains_modules(self) -> bool:
        """Whether more than cores is trained and saved."""
        return bool(self.modules_to_save or self.trainable_token_indices)

    @property
    def awaits_ranks(self) -> bool:
        """Whether a rank budget is still to be spent."""
        return self.rank_budget is not None and not self.rank_pattern

    @property
    def constructor_entry(self) -> Constructor[Any]:
        """The row of the constructor table."""
        return find_constructor(self.constructor)

    @property
    def needs_calibration(self) -> bool:
        """Whether P and Q come from data, so that ``frozencore.calibrate`` must run before training."""
        return self.basis_id is None and self.constructor_entry.needs_data(self.basis_options())

    def basis_options(self, rank: int | None = None) -> BasisOptions:
        """The options of the constructors, checked; ``rank`` overrides r for one layer."""
        row = self.constructor_entry
        given = {name: without_lists(getattr(self, name)) for name in options_of(row.options) if name != "rank"}
        return row.options(rank=self.r if rank is None else rank, **given)

    def require_one_round(self, what: str) -> None:
        """Refuse what takes an adapter on one basis.

        Args:
            what: What it would be, as a sentence begins.

        Raises:
            ConfigError: The adapter was refreshed.
        """
        if self.rounds > 1:
            raise ConfigError(
                f"{what} takes an adapter on one basis, but this one is a sum of {self.rounds} rounds, each on a basis "
                "of its own. Export or merge it, or train without refresh."
            )

    def find_basis(self, origin: str) -> SavedBasis:
        """The named basis: in or beside the folder that this was read from, or where ``basis`` says.

        Raises:
            ArtifactError: It is nowhere, another one, or damaged.
        """
        assert self.basis_id is not None
        return find_basis(origin, self.basis_id, beside=self._folder, named=self.basis, revision=self.basis_revision)

    def name_basis(self, identity: str | None, place: str | None = None, revision: str | None = None) -> None:
        """The adapter is on that basis from now on, and is saved as cores alone; None: on one of its own."""
        self.rounds = 1
        self.basis, self.basis_revision, self.basis_id, self._folder = place, revision, identity, None


add_option_fields(FrozenCoreConfig)


def options_of_basis() -> frozenset[str]:
    """The fields that say how P and Q came about and which layers they are of: what a saved basis records."""
    own = ("r", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "constructor", "alpha",
           "seed", "rank_budget", "rank_pattern", "alpha_pattern", "calibration_tokens")  # fmt: skip
    return frozenset({*own, *constructor_options()}) - {"initial_step"}


def _plain(value: Any) -> Any:
    """A field as JSON gives it back."""
    return sorted(value) if isinstance(value, set | list) else json.loads(json.dumps(value))
