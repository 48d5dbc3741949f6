"""The method of the paper: an r x r core between frozen bases from any constructor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from frozencore.constructors import CONSTRUCTORS, BasisOptions
from frozencore.maths.moments import MomentName
from frozencore.options import options_of
from frozencore.tune.methods.method import AdapterOptions, Method

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn

    from frozencore.adapter.config import FrozenCoreConfig

CORE_LEARNING_RATE = 1e-2  # measured on small models and SmolLM2; the paper has 5e-3, for orthonormal bases and s = 1


@dataclass(frozen=True, kw_only=True)
class FrozenCore(Method):
    """A frozen core with the bases of a named constructor."""

    constructor: str
    has_bases: ClassVar[bool] = True
    frozen_can_be_made_again: ClassVar[bool] = True

    def add(self, model: nn.Module, options: AdapterOptions, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        from peft import get_peft_model

        from frozencore.adapter.bases import set_bases
        from frozencore.adapter.model import FrozenCoreConfig

        if options.basis is not None:
            return get_peft_model(model, FrozenCoreConfig(basis=options.basis, task_type="CAUSAL_LM"))
        adapted = get_peft_model(model, self._config(options, load_bases=bases is not None))
        if bases is not None:
            set_bases(adapted, bases)
            adapted.peft_config["default"].load_bases = False
        return adapted

    def needs(self, options: AdapterOptions) -> frozenset[MomentName]:
        return frozenset() if options.basis is not None else CONSTRUCTORS[self.constructor].needs(self._read(options))

    def _read(self, options: AdapterOptions) -> BasisOptions:
        """The constructor's own options."""
        of_row = CONSTRUCTORS[self.constructor].options
        read = {name: value for name, value in options.core.items() if name in options_of(of_row)}
        return of_row(rank=options.rank, seed=options.seed, **read)

    def _write(self, model: PeftModel, folder: Path, start: Path) -> None:
        from frozencore.adapter.saved.card import begin_model_card

        begin_model_card(folder)
        super()._write(model, folder, start)

    def _config(self, options: AdapterOptions, *, load_bases: bool = False) -> FrozenCoreConfig:
        from frozencore.adapter.model import FrozenCoreConfig  # registers the tuner with PEFT

        return FrozenCoreConfig(
            r=options.rank,
            target_modules=options.targets if isinstance(options.targets, str) else list(options.targets),
            constructor=self.constructor,
            seed=options.seed,
            task_type="CAUSAL_LM",
            load_bases=load_bases,
            **options.core,
        )


class FrozenCores(Mapping[str, Method]):
    """A view of the constructors' table with a row for each constructor, including later additions."""

    def __getitem__(self, name: str) -> Method:
        row = CONSTRUCTORS[name]
        return FrozenCore(
            constructor=name, label=row.label or name, word=row.word, trains=("core",),
            learning_rate=CORE_LEARNING_RATE, weights_only=row.weights_only,
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(CONSTRUCTORS)

    def __len__(self) -> int:
        return len(CONSTRUCTORS)
