"""An adapter in a model: its name, its configuration and its layers, what these hold, and a pass with it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from frozencore.adapter.base_record import record_base, require_same_weights
from frozencore.adapter.basis import Basis, require_same_id
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.core import Core
from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.attributes import with_attributes
from frozencore.errors import ConfigError
from frozencore.maths.basis import LayerBasis


@dataclass(frozen=True)
class LoadedAdapter:
    """A frozen-core adapter in a model.

    Attributes:
        layers: By their name in the base model, in the model's order.
    """

    name: str
    config: FrozenCoreConfig
    layers: Mapping[str, FrozenCoreLinear]

    @classmethod
    def of(cls, model: nn.Module, name: str | None = None) -> LoadedAdapter:
        """The adapter of a name; by default the active one, or the only one.

        Raises:
            ConfigError: The model has no such frozen-core adapter, or several are active and none is named.
        """
        configs: dict[str, Any] = getattr(model, "peft_config", {})
        known = [each for each, config in configs.items() if isinstance(config, FrozenCoreConfig)]
        if name is None and known:
            active: Any = getattr(model, "active_adapters", None) if len(known) > 1 else known
            names = list((active() if callable(active) else active) or known[:1])  # transformers has a method
            if len(cores := [each for each in names if each in known]) > 1:
                raise ConfigError(
                    f"One frozen core is taken, but {', '.join(map(repr, cores))} are active. Give one as "
                    "adapter_name, activate one alone, or sum them first: add_weighted_adapter."
                )
            name = names[0]
        if name is None or name not in known:
            named = "" if name is None else f" {name!r}"
            others = (
                f", only {', '.join(map(repr, known))}. Give one of these as adapter_name."
                if known
                else ". Call peft.get_peft_model(model, FrozenCoreConfig(...)) first."
            )
            raise ConfigError(f"This model has no frozen-core adapter{named}{others}")
        return cls(name, configs[name], frozen_core_layers(model, name))

    @property
    def bases(self) -> dict[str, LayerBasis]:
        """P, Q and s of each layer, not copied."""
        return {name: layer.basis(self.name) for name, layer in self.layers.items()}

    @property
    def cores(self) -> dict[str, Tensor]:
        """R of each layer, not copied, in the order of a core's values.

        Raises:
            ModelError: A core is pruned, parametrised or offloaded.
        """
        return {name: self.layers[name].stored_core(self.name) for name in sorted(self.layers)}

    @property
    def ranks(self) -> dict[str, int]:
        """r of each layer, in the order of a core's values."""
        return {name: len(self.layers[name].core(self.name)) for name in sorted(self.layers)}

    @property
    def core(self) -> Core:
        """The core, copied."""
        return Core.of(self.basis_id, self.cores)

    @property
    def basis_id(self) -> str:
        """The id of the basis that the adapter was given, or that its P and Q make."""
        if (attached := self.attached_id) is not None:
            return attached
        basis = self.make_basis()
        self.attach_id(basis)
        return basis.id

    @property
    def attached_id(self) -> str | None:
        """The id of the basis that P and Q are of; None if they have none, or were changed since."""
        ids = {layer.current_basis_id(self.name) for layer in self.layers.values()}
        return ids.pop() if len(ids) == 1 else None

    def has_basis(self, basis_id: str | None) -> bool:
        """Whether P and Q are of this basis, by the hash of their values."""
        return all(layer.current_basis_id(self.name, by_hash=True) == basis_id for layer in self.layers.values())

    def attach_id(self, basis: Basis, will_load: Mapping[str, LayerBasis] | None = None) -> None:
        """Remember in each layer that P and Q are of this basis.

        Args:
            will_load: P and Q that the model's state dict is about to bring.
        """
        for name, layer in self.layers.items():
            coming = None if will_load is None else will_load[name]
            layer.attach_basis_id(self.name, basis.id, basis.digests[name], will_load=coming)

    def make_basis(self, calibrated_on: str | None = None) -> Basis:
        """The basis that P, Q and the scales are now, on the base model as it is now."""
        return self.config.make_basis(self.bases, base=self.base_record, calibrated_on=calibrated_on)

    @property
    def base_samples(self) -> dict[str, Tensor | None]:
        """Some values of the base model's weights by layer name."""
        return {name: layer.base_samples for name, layer in self.layers.items()}

    @property
    def base_record(self) -> dict[str, str] | None:
        """The record of the base model as it is now."""
        return record_base(self.base_samples)

    def require_same_base(self, origin: str, recorded: Mapping[str, str] | None) -> None:
        """Refuse a base model whose weights differ from the record, unless the configuration allows it."""
        if recorded is not None and not self.config.allow_other_base:
            require_same_weights(origin, recorded, self.base_samples)

    def require_basis(self, basis_id: str) -> None:
        """Refuse an adapter that was given another basis since cores were prepared for it, or that was deleted."""
        there = all(self.name in layer.frozencore_R for layer in self.layers.values())
        here = self.attached_id if there else None
        require_same_id("What was prepared", basis_id, f"the adapter {self.name!r} now has", here)


@contextmanager
def only_adapter(model: nn.Module, adapter_name: str, *, with_cores: bool = True) -> Iterator[None]:
    """Compute with one adapter and the modules that it trains inside; with_cores=False leaves out its cores."""
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                is_off = isinstance(module, BaseTunerLayer) and adapter_name not in module._get_available_adapters()
                is_off |= isinstance(module, FrozenCoreLinear) and not with_cores
                undo.enter_context(with_attributes(module, _disable_adapters=is_off, _active_adapter=[adapter_name]))
        yield


def frozen_core_layers(model: nn.Module, adapter_name: str) -> dict[str, FrozenCoreLinear]:
    """The layers that have an adapter, by their name in the base model."""
    layers = (module for module in model.modules() if isinstance(module, FrozenCoreLinear))
    return {layer.name: layer for layer in layers if adapter_name in layer.frozencore_R}
