"""Methods: a frozen core for every basis constructor, LoRA, DoRA and PiSSA of PEFT, and full fine-tuning.

A new method needs a class and a row of :data:`METHODS`; constructors have rows already. The learning rates are usual
middle values, from which a search can start. The warm-up is the paper's 0.1.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

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
from frozencore.files.atomic_write import atomic_folder
from frozencore.maths.moments import MomentName
from frozencore.maths.quantise import Bits
from frozencore.options import Bounds, ConfigPart, Option, options_of
from frozencore.text import unknown_name

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig, PeftModel
    from torch import nn

    from frozencore.adapter.config import FrozenCoreConfig
    from frozencore.adapter.core import Core
    from frozencore.maths.basis import LayerBasis


Targets = Annotated[tuple[str, ...], Bounds(min_items=1)] | Literal["all-linear"]
SEED = 42
Seed = Annotated[int, Bounds(ge=0, lt=2**32), "Seed of calibration rows, row order and random directions."]


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
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

    @property
    def initialises(self) -> bool:
        """Return whether a phase before training reads the data or the base weights."""
        return self.has_bases or self.changes_base

    def default_targets(self, model: nn.Module) -> Targets | None:
        """The default layers; None means the attention projections."""
        return None

    @abstractmethod
    def add(self, model: nn.Module, options: MethodConfig, bases: Mapping[str, LayerBasis] | None = None) -> PeftModel:
        """Add the adapter without calibration; the model's output does not change.

        Args:
            bases: The layers of the basis of a ``weights_only`` method, to save the computation.

        Raises:
            ConfigError: The options contradict one another or do not fit the model.
        """

    def needs(self, options: MethodConfig) -> frozenset[MomentName]:
        """The moments that the method needs; empty if it needs none.

        A method with needs is calibrated by :func:`frozencore.calibrate`, so its layers are frozen cores.
        """
        return frozenset()

    def keep_start(self, model: PeftModel, folder: Path) -> None:  # noqa: B027  # for most there is nothing to do
        """Store in a folder the initial state that :meth:`save` needs; by default nothing."""

    def save(self, model: PeftModel, folder: Path, start: Path, core: Core | None = None) -> None:
        """Save a trained adapter atomically, for ``PeftModel.from_pretrained`` on the original base model.

        Args:
            start: The folder of :meth:`keep_start`.
            core: A core of fewer bits, in place of the model's.
        """
        if core is None:
            with atomic_folder(folder, overwrite=True) as aside:
                self._write(model, aside, start)
            return
        from frozencore.adapter.folders import read_adapter

        with TemporaryDirectory() as whole:
            self._write(model, Path(whole), start)
            read_adapter(whole).write(folder, core, overwrite=True)

    def _write(self, model: PeftModel, folder: Path, start: Path) -> None:
        model.save_pretrained(str(folder))


def targeted_layers(model: nn.Module, targets: Targets) -> list[str]:
    """The full names of the layers, in the model's order; ``all-linear`` excludes the output layer.

    A name or the end of a name selects linear layers; a full name may also select another module with parameters.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if targets == "all-linear":
        head = cast(Any, model).get_output_embeddings()
        return [name for name, module in linear.items() if module is not head]
    named = set(targets)
    return [
        name
        for name, module in model.named_modules()
        if (name in named and any(True for _ in module.parameters(recurse=False)))
        or (name in linear and any(name.endswith(f".{one}") for one in targets))
    ]


@dataclass(frozen=True, kw_only=True)
class FromPEFT(Method):
    """A method of PEFT at the rank and on the targets of frozen cores, in float32 also on a 16-bit base."""

    @abstractmethod
    def config(self, options: MethodConfig, model: nn.Module) -> PeftConfig:
        """The configuration for PEFT."""

    def add(self, model: nn.Module, options: MethodConfig, bases: Mapping[str, LayerBasis] | None = None) -> PeftModel:
        """Add the adapter; the global random state is restored."""
        import torch
        from peft import get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(options.seed)
            try:
                return get_peft_model(model, self.config(options, model))
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"The targets {options.target_modules!r} cannot carry {self.label}: {error}"
                ) from error


def as_peft_takes(options: MethodConfig) -> str | list[str] | None:
    """The targets in the form of a PEFT configuration."""
    return list(options.target_modules) if isinstance(options.target_modules, tuple) else options.target_modules


@dataclass(frozen=True, kw_only=True)
class LoRA(FromPEFT):
    """LoRA, and DoRA with ``use_dora``, which also trains a magnitude for each output.

    Scale 1 (``lora_alpha = r``) and no dropout. The factors are about ``r (m + n)`` values a layer, where a core has
    ``r r``, and train with smaller steps.
    """

    use_dora: bool = False
    initialisation: ClassVar[Literal[True, "pissa"]] = True

    def config(self, options: MethodConfig, model: nn.Module) -> PeftConfig:
        from peft import LoraConfig

        return LoraConfig(
            r=options.r,
            lora_alpha=options.r,
            lora_dropout=0.0,
            bias="none",
            target_modules=as_peft_takes(options),
            init_lora_weights=self.initialisation,
            use_dora=self.use_dora,
            task_type="CAUSAL_LM",
        )


@dataclass(frozen=True, kw_only=True)
class PiSSA(LoRA):
    """LoRA whose factors start as the leading part of every base weight, which is subtracted from the weight.

    This changes the base model in place, so the factors alone do not fit the original model. The saved adapter is
    therefore the difference from the start: a plain LoRA of twice the rank, which loads on the original weights.
    """

    initialisation: ClassVar[Literal[True, "pissa"]] = "pissa"
    changes_base: ClassVar[bool] = True

    def keep_start(self, model: PeftModel, folder: Path) -> None:
        model.save_pretrained(str(folder))

    def _write(self, model: PeftModel, folder: Path, start: Path) -> None:
        with warnings.catch_warnings():  # PEFT warns to convert although it converts here
            warnings.filterwarnings("ignore", message="PiSSA changes the base weights")
            model.save_pretrained(str(folder), path_initial_model_for_weight_conversion=str(start))


FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class FullFineTuning(FromPEFT):
    """Train every weight of the model, including embeddings and norms, or the weights and biases of named targets.

    The saved adapter is as large as they are.
    """

    unread: ClassVar[tuple[str, ...]] = ("r", "bits")

    def default_targets(self, model: nn.Module) -> Targets:
        """Every module with its own parameters; for tied embeddings the input embedding."""
        head = cast(Any, model).get_output_embeddings()
        names = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
        return tuple(
            name for name in names if model.get_submodule(name) is not head or not _ties_its_embeddings(model, names)
        )

    def add(self, model: nn.Module, options: MethodConfig, bases: Mapping[str, LayerBasis] | None = None) -> PeftModel:
        from peft.utils import ModulesToSaveWrapper

        adapted = super().add(model, options, bases)
        for module in adapted.modules():
            if isinstance(module, ModulesToSaveWrapper):
                dtype = next(module.original_module.parameters()).dtype
                _train_in_float32(module.modules_to_save["default"], dtype)
        return adapted

    def config(self, options: MethodConfig, model: nn.Module) -> PeftConfig:
        from peft import LoraConfig
        from peft.utils.constants import DUMMY_TARGET_MODULES

        names = targeted_layers(model, options.target_modules or self.default_targets(model))
        if not names:
            raise ValueError("no linear layer is called so")
        for name in names:
            if not all(parameter.is_floating_point() for parameter in model.get_submodule(name).parameters()):
                raise ConfigError(
                    f"{self.label} trains the weights themselves, but those of {name} are quantised. Load the model "
                    "without quantisation, or train an adapter."
                )
        return LoraConfig(
            target_modules=DUMMY_TARGET_MODULES,
            modules_to_save=names,
            ensure_weight_tying=_ties_its_embeddings(model, names),
            task_type="CAUSAL_LM",
        )


def _train_in_float32(module: nn.Module, dtype: torch.dtype) -> None:
    """Make a module's weights float32; its output keeps the model's dtype, also if tied weights are float32 already."""
    if dtype.itemsize >= FLOAT32_BYTES:
        return
    module.float()
    module.register_forward_pre_hook(lambda _, given: tuple(x.float() if x.is_floating_point() else x for x in given))
    module.register_forward_hook(lambda _, __, result: result.to(dtype))


def _ties_its_embeddings(model: nn.Module, names: list[str]) -> bool:
    """Return whether the output layer shares the input embeddings' weight, and these are among the modules."""
    inputs, outputs = cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()
    is_named = any(model.get_submodule(name) is inputs for name in names)
    return is_named and outputs is not None and outputs.weight is inputs.weight


@dataclass(frozen=True, kw_only=True)
class FrozenCore(Method):
    """A frozen core with the bases of a named constructor."""

    constructor: str
    has_bases: ClassVar[bool] = True
    unread: ClassVar[tuple[str, ...]] = ()

    def add(self, model: nn.Module, options: MethodConfig, bases: Mapping[str, LayerBasis] | None = None) -> PeftModel:
        from peft import get_peft_model

        from frozencore.adapter.bases import set_basis
        from frozencore.adapter.model import FrozenCoreConfig

        if options.basis is not None:
            return get_peft_model(model, FrozenCoreConfig(basis=options.basis, task_type="CAUSAL_LM"))
        adapted = get_peft_model(model, self._config(options, load_bases=bases is not None))
        if bases is not None:
            set_basis(adapted, bases)
        return adapted

    def needs(self, options: MethodConfig) -> frozenset[MomentName]:
        return (
            frozenset() if options.basis is not None else find_constructor(self.constructor).needs(self._read(options))
        )

    def _read(self, options: MethodConfig) -> BasisOptions:
        """The constructor's own options."""
        of_row = find_constructor(self.constructor).options
        read = {name: value for name, value in options.core.items() if name in options_of(of_row)}
        return of_row(r=options.r, seed=options.seed, **read)

    def _write(self, model: PeftModel, folder: Path, start: Path) -> None:
        from frozencore.adapter.card import begin_model_card

        begin_model_card(folder)
        super()._write(model, folder, start)

    def _config(self, options: MethodConfig, *, load_bases: bool = False) -> FrozenCoreConfig:
        from frozencore.adapter.model import FrozenCoreConfig  # registers the tuner with PEFT

        known = options_of(FrozenCoreConfig)
        return FrozenCoreConfig(
            r=options.r,
            target_modules=as_peft_takes(options),
            constructor=self.constructor,
            seed=options.seed,
            task_type="CAUSAL_LM",
            load_bases=load_bases,
            constructor_options={name: value for name, value in options.core.items() if name not in known},
            **{name: value for name, value in options.core.items() if name in known},
        )


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


def method_name(name: str) -> str:
    """A method's label; the name itself if it is not in the table, as in records of another version."""
    return METHODS[name].label if name in METHODS else name


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
    bits: Bits = 32
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
    def moments_needed(self) -> frozenset[MomentName]:
        """The moments that the method needs; empty for a method without calibration."""
        return self.entry.needs(self)
