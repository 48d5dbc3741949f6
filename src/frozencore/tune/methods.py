"""Methods: a frozen core for every basis constructor, LoRA, DoRA and PiSSA of PEFT, and full fine-tuning.

A new method needs a row of :data:`METHODS` and its way onto a model (:func:`frozencore.tune.adapters.add_adapter`);
constructors have both already. The learning rates are usual middle values, from which a search can start. The warm-up
is the paper's 0.1.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.constructors import (
    COMPRESSED,
    CONSTRUCTORS,
    BasisOptions,
    check_unused_options,
    constructor_options,
    find_constructor,
)
from frozencore.constructors.constructor import Rank, ScaleOptions
from frozencore.errors import ConfigError
from frozencore.maths.moments import MomentName
from frozencore.maths.quantise import Bits, default_bits
from frozencore.options import Bounds, ConfigPart, Option, options_of
from frozencore.text import unknown_name

Targets = Annotated[tuple[str, ...], Bounds(min_items=1)] | Literal["all-linear"]
SEED = 42
Seed = Annotated[int, Bounds(ge=0, lt=2**32), "Seed of calibration rows, row order and random directions."]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train a model: a row of :data:`frozencore.tune.methods.METHODS`.

    Attributes:
        label: Name in reports.
        basis_source: Where its bases come from, or what it trains, in one word.
        trains: The kinds of trained values: ``core``, ``factors``, ``magnitudes`` (one a channel), or another kind,
            which reports show in a new column.
        learning_rate, warmup: Defaults of a run: the peak learning rate, and the share of the steps in which it rises.
            A rate of None is measured on the run's rows (:mod:`frozencore.adapter.learning_rate`).
        weights_only: The bases depend only on the base weights, so runs share them.
        changes_base: The method changes the base model's weights in place, so nothing else can use the model
            afterwards.
        has_bases: P and Q are frozen. They are hashed in the record, described in the card, and can be computed again
            from the base model and the data, so only the core must be stored.
        unread: Options of other methods, which this method refuses.
    """

    label: str
    basis_source: str = ""
    trains: tuple[str, ...]
    learning_rate: float | None
    warmup: float = 0.1
    weights_only: bool = False
    changes_base: ClassVar[bool] = False
    has_bases: ClassVar[bool] = False
    unread: ClassVar[tuple[str, ...]] = ("bits",)

    def needs(self, options: MethodConfig) -> frozenset[MomentName]:
        """The moments that the method needs; empty if it needs none.

        A method with needs is calibrated by :func:`frozencore.calibrate`, so its layers are frozen cores.
        """
        return frozenset()


@dataclass(frozen=True, kw_only=True)
class LoRA(Method):
    """LoRA, and DoRA with ``use_dora``, which also trains a magnitude for each output.

    Scale 1 (``lora_alpha = r``) and no dropout. The factors are about ``r (m + n)`` values a layer, where a core has
    ``r r``, and train with smaller steps.
    """

    use_dora: bool = False
    initialisation: ClassVar[Literal[True, "pissa"]] = True


@dataclass(frozen=True, kw_only=True)
class PiSSA(LoRA):
    """LoRA whose factors start as the leading part of every base weight, which is subtracted from the weight.

    This changes the base model in place, so the factors alone do not fit the original model. The saved adapter is
    therefore the difference from the start: a plain LoRA of twice the rank, which loads on the original weights.
    """

    initialisation: ClassVar[Literal[True, "pissa"]] = "pissa"
    changes_base: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class FullFineTuning(Method):
    """Train every weight of the model, including embeddings and norms, or the weights and biases of named targets.

    The saved adapter is as large as they are.
    """

    unread: ClassVar[tuple[str, ...]] = ("r", "bits")


@dataclass(frozen=True, kw_only=True)
class FrozenCore(Method):
    """A frozen core with the bases of a named constructor."""

    constructor: str
    has_bases: ClassVar[bool] = True
    unread: ClassVar[tuple[str, ...]] = ()

    def needs(self, options: MethodConfig) -> frozenset[MomentName]:
        if options.basis is not None:
            return frozenset()
        row = find_constructor(self.constructor)
        read = {name: value for name, value in options.core.items() if name in options_of(row.options)}
        return row.needs(row.options(r=options.r, seed=options.seed, **read))


class FrozenCores(Mapping[str, Method]):
    """A view of the constructors' table with a row for each constructor, including later additions."""

    def __getitem__(self, name: str) -> Method:
        row = find_constructor(name) if name == COMPRESSED else CONSTRUCTORS[name]
        return FrozenCore(
            constructor=name, label=row.label or name, basis_source=row.basis_source, trains=("core",),
            learning_rate=None, weights_only=row.weights_only,
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(CONSTRUCTORS)

    def __len__(self) -> int:
        return len(CONSTRUCTORS)


METHODS: ChainMap[str, Method] = ChainMap(
    {
        "lora": LoRA(label="LoRA", basis_source="factors", trains=("factors",), learning_rate=1e-3),
        "dora": LoRA(
            label="DoRA", basis_source="magnitudes", trains=("factors", "magnitudes"), learning_rate=1e-3, use_dora=True
        ),
        "pissa": PiSSA(label="PiSSA", basis_source="leading", trains=("factors",), learning_rate=2e-4),
        "full": FullFineTuning(
            label="Full fine-tuning", basis_source="weights", trains=("weights",), learning_rate=2e-5
        ),
    },
    FrozenCores(),  # type: ignore[arg-type]  # only read
)


def find_method(name: str) -> Method:
    """The table's row of this name.

    Raises:
        ConfigError: There is no such method; the message suggests the nearest name.
    """
    if name not in METHODS:
        raise ConfigError(unknown_name("method", name, METHODS))
    return METHODS[name]


def core_options() -> dict[str, Option]:
    """The options of cores and bases by name, of all constructors in the current table."""
    return {**options_of(ScaleOptions), **constructor_options()}


@dataclass(frozen=True, kw_only=True)
class MethodConfig(ConfigPart):
    """What is trained: the method, its layers, its bases and their calibration.

    Attributes:
        core: The given options of cores and constructors, by name.
        given: The names of all options that are given, also at their defaults: a saved basis may not differ from them.
    """

    name: Annotated[str, "What to train."] = "fcca"
    r: Rank = BasisOptions.r
    target_modules: Annotated[
        Targets | None,
        "Layers to adapt: names, or all-linear. Default: the attention projections; for full, every weight.",
    ] = None
    layers: Annotated[int | None, Bounds(ge=1), "Adapt only the last so many blocks. Default: all."] = None
    basis: Annotated[
        str | None,
        "Train on a saved basis, given by its folder or hub id. It determines method, rank, targets and scale, and the "
        "adapter is saved as cores only.",
    ] = None
    start_from: Annotated[
        str | None,
        "Start from the core of an adapter on --basis: its folder, or that of its run; merge makes the mean of "
        "several. Default: zero.",
    ] = None
    bits: Bits = None
    core: dict[str, Any] = field(default_factory=dict)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    seed: Seed = SEED
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = core_options()
        for name in self.core:
            if name not in known:
                raise ConfigError(unknown_name("option", name, known))
        object.__setattr__(self, "core", {name: known[name].validate(value) for name, value in self.core.items()})
        self.refuse_changed(self.entry.unread, f"The method {self.name!r} does not read {{name}}. Leave {{flag}} out.")
        check_unused_options(self.name, {name: v for name, v in self.core.items() if v != known[name].default})
        if self.basis is not None and self.layers is not None:
            raise ConfigError("A saved basis has its own layers: leave --layers out.")
        if self.start_from is not None and self.basis is None:
            raise ConfigError("--start-from takes a core on a saved basis: name that basis with --basis.")

    @property
    def entry(self) -> Method:
        """The method's row in the table of methods."""
        return find_method(self.name)

    @property
    def saved_bits(self) -> int:
        """Bits of a value of the saved core."""
        return self.bits or default_bits(self.r)

    @property
    def moments_needed(self) -> frozenset[MomentName]:
        """The moments that the method needs; empty for a method without calibration."""
        return self.entry.needs(self)
