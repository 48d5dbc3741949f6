"""Everything that can be trained on a model, as runs, campaigns and reports see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from frozencore.constructors import Colour
from frozencore.files.whole_file import whole_folder
from frozencore.maths.moments import MomentName

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn


Budget = Literal["instead of the rank", "beside the rank"]
Targets = Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"]


@dataclass(frozen=True)
class AdapterOptions:
    """What an adapter is built by, beside its method, the model and the data.

    Attributes:
        rank: r of what is added; of prompt tuning the number of virtual tokens.
        targets: Names of the layers to adapt, or ``"all-linear"``.
        seed: Of whatever is drawn.
        core: Options of frozen cores by name, as :class:`frozencore.FrozenCoreConfig` takes them.
        basis: Where a saved basis is, whose rank and targets then count.
        rank_budget: Trained values of all cores together, or of another method with a :attr:`Method.budget`.
    """

    rank: int
    targets: Targets
    seed: int
    core: Mapping[str, Any]
    basis: str | None = None
    rank_budget: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """One way to train a model: a row of :data:`frozencore.tune.methods.METHODS`.

    Attributes:
        label: How reports call it.
        colour: Of its bars and points.
        trains: The kinds of values that it trains: ``core``, ``factors``, ``magnitudes`` (one a channel), or a kind of
            its own, which reports then show in a column of its own.
        learning_rate, warmup: Its recipe, where a run does not say: the peak rate, and the share of the steps in which
            it rises.
        weights_only: Its bases depend on the base weights and nothing else, so that runs share them.
        changes_base: It changes the base model's weights in place: nothing else may use that model afterwards.
        has_bases: Its P and Q are frozen. They are hashed in the record, described in a card, and can be made again
            from the base model and the data; the core between them is small enough for training to keep its last good
            value.
        reads_weights: It looks at the base weights, without changing them, when it is added.
        frozen_can_be_made_again: What it adds and does not train is a function of the base model, the data and the
            seed, so that the trained values are all that must be stored.
        optimiser: As transformers calls it, whose state has the run's rank; None for AdamW.
        unread: Options of a run that other methods read and this one does not: they are refused.
        budget: Whether it takes a number of trained values, and whether that is said in place of a rank.
    """

    label: str
    colour: Colour = "black"
    trains: tuple[str, ...]
    learning_rate: float
    warmup: float = 0.1
    weights_only: bool = False
    optimiser: str | None = None
    changes_base: ClassVar[bool] = False
    has_bases: ClassVar[bool] = False
    reads_weights: ClassVar[bool] = False
    frozen_can_be_made_again: ClassVar[bool] = False
    unread: ClassVar[tuple[str, ...]] = ()
    budget: ClassVar[Budget | None] = None

    @property
    def adds_up(self) -> bool:
        """Whether the sum of what several rounds train is an adapter of its kind, so that it trains in rounds."""
        return False

    @property
    def initialises(self) -> bool:
        """Whether there is a phase before training that the data or the weights are looked at in."""
        return self.has_bases or self.changes_base or self.reads_weights

    def default_targets(self, model: nn.Module) -> Targets | None:
        """The layers that train where a run names none; None for the attention projections."""
        return None

    def require(self) -> None:  # noqa: B027  # most need nothing
        """Refuse a run that lacks what is no dependency of this package.

        Raises:
            ConfigError: It is not installed.
        """

    @abstractmethod
    def add(self, model: nn.Module, options: AdapterOptions, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        """The model with the adapter on it, not yet calibrated: it gives what the model gives.

        Args:
            bases: What :func:`frozencore.get_bases` found of a ``weights_only`` method, to spare the work.

        Raises:
            ConfigError: The options contradict one another or do not fit the model.
        """

    def needs(self, options: AdapterOptions) -> frozenset[MomentName]:
        """What it reads of the calibration data; nothing for a method that needs none.

        One that needs some is calibrated by :func:`frozencore.calibrate`, so its layers are frozen cores.
        """
        return frozenset()

    def keep_start(self, model: PeftModel, folder: Path) -> None:  # noqa: B027  # for most there is nothing to do
        """Keep in a folder what :meth:`save` needs of the adapter as it is before training; mostly nothing."""

    def save(self, model: PeftModel, folder: Path, start: Path) -> None:
        """Save a trained adapter, whole or not at all, for ``PeftModel.from_pretrained`` on the original base model.

        Args:
            start: Where :meth:`keep_start` kept something.
        """
        with whole_folder(folder, overwrite=True) as aside:
            self._write(model, aside, start)

    def _write(self, model: PeftModel, folder: Path, start: Path) -> None:
        model.save_pretrained(str(folder))


def targeted_layers(model: nn.Module, targets: Targets) -> list[str]:
    """The full names of the layers, in the model's order; ``all-linear`` leaves the output layer out.

    A name or the end of one means linear layers; a full name also another module with parameters of its own.
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
