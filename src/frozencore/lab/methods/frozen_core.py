"""The method of the paper: an r x r core between frozen bases, which any constructor may choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from peft import PeftModel, get_peft_model
from torch import Tensor, nn

from frozencore.adapter.bases.carried import set_bases
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import frozen_core_layers
from frozencore.adapter.seal.card import begin_model_card
from frozencore.constructors import CONSTRUCTORS
from frozencore.fingerprint import fingerprint_tensors
from frozencore.lab.methods.method import AdapterOptions, Method
from frozencore.maths.moments import MomentName

CORE_LEARNING_RATE = 5e-3  # the paper's for FCCA, and of every constructor's grid


@dataclass(frozen=True, kw_only=True)
class FrozenCore(Method):
    """A frozen core whose bases the constructor of that name chooses."""

    constructor: str
    has_bases: ClassVar[bool] = True

    def add(self, model: nn.Module, options: AdapterOptions, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        if options.basis is not None:
            return get_peft_model(model, FrozenCoreConfig(basis=options.basis, task_type="CAUSAL_LM"))
        adapted = get_peft_model(model, self._config(options, load_bases=bases is not None))
        if bases is not None:
            set_bases(adapted, bases)
            adapted.peft_config["default"].load_bases = False
        return adapted

    def needs(self, options: AdapterOptions) -> frozenset[MomentName]:
        if options.basis is not None:
            return frozenset()
        config = self._config(options)
        return config.constructor_entry.needs(config.basis_options())

    def _write(self, model: PeftModel, folder: Path, start: Path) -> None:
        begin_model_card(folder)
        super()._write(model, folder, start)

    def _config(self, options: AdapterOptions, *, load_bases: bool = False) -> FrozenCoreConfig:
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
    """A row for each constructor of the table, at any time."""

    def __getitem__(self, name: str) -> Method:
        row = CONSTRUCTORS[name]
        return FrozenCore(
            constructor=name, label=row.label or name, colour=row.colour, trains=("core",),
            learning_rate=CORE_LEARNING_RATE, weights_only=row.weights_only,
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(CONSTRUCTORS)

    def __len__(self) -> int:
        return len(CONSTRUCTORS)


def basis_fingerprint(model: nn.Module) -> str:
    """SHA-256 of every layer's P and Q."""
    layers = frozen_core_layers(model, "default")
    factors = {name: layer.factors("default")[:2] for name, layer in sorted(layers.items())}
    return fingerprint_tensors(
        (f"{name}.{side}", X) for name, pair in factors.items() for side, X in zip("PQ", pair, strict=True)
    )
