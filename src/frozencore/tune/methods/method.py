"""The interface of a method, for runs, campaigns and reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from frozencore.files.whole_file import whole_folder
from frozencore.maths.moments import MomentName

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn


Targets = Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"]


@dataclass(frozen=True)
class AdapterOptions:
    """The options of an adapter, beside its method, the model and the data.

    Attributes:
        rank: The rank r.
        targets: Names of the layers to adapt, or ``"all-linear"``.
        seed: Seed of random values.
        core: Options of frozen cores by name, for :class:`frozencore.FrozenCoreConfig`.
        basis: The folder or hub id of a saved basis, which determines rank and targets.
    """

    rank: int
    targets: Targets
    seed: int
    core: Mapping[str, Any]
    basis: str | None = None


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """One way to train a model: a row of :data:`frozencore.tune.methods.METHODS`.

    Attributes:
        label: Name in reports.
        word: What it trains, or where its bases come from, in one word.
        trains: The kinds of trained values: ``core``, ``factors``, ``magnitudes`` (one a channel), or another kind,
            which reports show in a new column.
        learning_rate, warmup: Defaults of a run: the peak learning rate, and the share of the steps in which it rises.
        weights_only: The bases depend only on the base weights, so runs share them.
        changes_base: The method changes the base model's weights in place, so nothing else can use the model
            afterwards.
        has_bases: P and Q are frozen. They are hashed in the record, described in the card, and can be computed again
            from the base model and the data. The core is small, so training keeps its last good value.
        frozen_can_be_made_again: The untrained part is a function of the base model, the data and the seed, so only
            the trained values must be stored.
        unread: Options of other methods, which this method refuses.
    """

    label: str
    word: str = ""
    trains: tuple[str, ...]
    learning_rate: float
    warmup: float = 0.1
    weights_only: bool = False
    changes_base: ClassVar[bool] = False
    has_bases: ClassVar[bool] = False
    frozen_can_be_made_again: ClassVar[bool] = False
    unread: ClassVar[tuple[str, ...]] = ()

    @property
    def initialises(self) -> bool:
        """Return whether a phase before training reads the data or the base weights."""
        return self.has_bases or self.changes_base

    def default_targets(self, model: nn.Module) -> Targets | None:
        """The default layers; None means the attention projections."""
        return None

    @abstractmethod
    def add(self, model: nn.Module, options: AdapterOptions, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        """Add the adapter without calibration; the model's output does not change.

        Args:
            bases: The result of :func:`frozencore.get_bases` for a ``weights_only`` method, to save the computation.

        Raises:
            ConfigError: The options contradict one another or do not fit the model.
        """

    def needs(self, options: AdapterOptions) -> frozenset[MomentName]:
        """The moments that the method needs; empty if it needs none.

        A method with needs is calibrated by :func:`frozencore.calibrate`, so its layers are frozen cores.
        """
        return frozenset()

    def keep_start(self, model: PeftModel, folder: Path) -> None:  # noqa: B027  # for most there is nothing to do
        """Store in a folder the initial state that :meth:`save` needs; by default nothing."""

    def save(self, model: PeftModel, folder: Path, start: Path) -> None:
        """Save a trained adapter atomically, for ``PeftModel.from_pretrained`` on the original base model.

        Args:
            start: The folder of :meth:`keep_start`.
        """
        with whole_folder(folder, overwrite=True) as aside:
            self._write(model, aside, start)

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
