"""The table of basis constructors. A new constructor needs a file here, with a class, and a row below.

Configurations, campaigns and flags read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frozencore.constructors.constructor import BasisOptions, Compressed, Constructor, LayerData
from frozencore.constructors.eva import Eva, EvaOptions
from frozencore.constructors.fcca import FCCA, FCCAOptions, RawGrad
from frozencore.constructors.filora import FiLoRA, FiLoRAOptions
from frozencore.constructors.lora_xs import LoRAXS, MiLoRA
from frozencore.constructors.random import Random, VeRA
from frozencore.constructors.signgrad import SignGrad, SignGradOptions
from frozencore.device import without_autocast
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.basis import LayerBasis
from frozencore.options import Option, options_of
from frozencore.text import unknown_name

__all__ = [
    "COMPRESSED",
    "CONSTRUCTORS",
    "DEFAULT",
    "BasisOptions",
    "Constructor",
    "EvaOptions",
    "FCCAOptions",
    "FiLoRAOptions",
    "LayerData",
    "SignGradOptions",
    "build_basis",
    "check_unused_options",
    "constructor_options",
    "constructors_reading",
    "described",
    "find_constructor",
]  # fmt: skip

CONSTRUCTORS: dict[str, Constructor[Any]] = {
    "fcca": FCCA(),
    "rawgrad": RawGrad(),
    "signgrad": SignGrad(),
    "filora": FiLoRA(),
    "eva": Eva(),
    "lora_xs": LoRAXS(),
    "milora": MiLoRA(),
    "random": Random(),
    "vera": VeRA(),
}
DEFAULT = "fcca"
COMPRESSED = "compressed"
"""The constructor that a basis of `frozencore compress` names: it is not in the table, because it builds no basis."""


def find_constructor(name: str) -> Constructor[Any]:
    """The table's row of this name.

    Raises:
        ConfigError: There is no such constructor; the message suggests the nearest name.
    """
    if name == COMPRESSED:
        return Compressed()
    if not isinstance(name, str) or name not in CONSTRUCTORS:
        way_out = "Your own is one after frozencore.register_constructor."
        raise ConfigError(f"{unknown_name('constructor', str(name), CONSTRUCTORS)} {way_out}")
    return CONSTRUCTORS[name]


def constructor_options() -> dict[str, Option]:
    """The options of all constructors by name, without rank and seed, which belong to the adapter or the run."""
    return {
        name: option
        for row in CONSTRUCTORS.values()
        for name, option in options_of(row.options).items()
        if name not in ("r", "seed")
    }


def constructors_reading(option: str) -> tuple[str, ...]:
    """The constructors that read an option; all constructors for an option that none reads, such as a scale."""
    reading = tuple(name for name, row in CONSTRUCTORS.items() if option in options_of(row.options))
    return reading or tuple(CONSTRUCTORS)


def described(option: Option) -> str:
    """The help of an option, preceded by the names of its constructors if only some read it."""
    reading = constructors_reading(option.name)
    return option.help if len(reading) == len(CONSTRUCTORS) else f"{', '.join(reading)}: {option.help}"


def check_unused_options(constructor: str, given: Mapping[str, Any]) -> None:
    """Refuse options that this constructor does not read: they would silently change nothing.

    Args:
        constructor: A name of the table, or another method, which reads no constructor's options.

    Raises:
        ConfigError: An unread option is not at its default; the message names the first one.
    """
    known = constructor_options()
    for name, value in given.items():
        reading = constructors_reading(name)
        if constructor not in reading and not (name in known and value == known[name].default):
            raise ConfigError(
                f"The method {constructor!r} does not read {name} (it is for {', '.join(reading)}). Leave it out."
            )


@without_autocast()
def build_basis(constructor: str, layer: LayerData, options: BasisOptions) -> LayerBasis:
    """Build one layer's basis with the named constructor; errors name the layer.

    Args:
        options: Options of the constructor's class. Plain ``BasisOptions`` leave its other options at their defaults.

    Raises:
        CalibrationError: A moment is missing or not finite.
        ConfigError: There is no such constructor.

    >>> layer = LayerData("q_proj", (6, 4), weight=lambda: torch.randn(6, 4))
    >>> build_basis("lora_xs", layer, BasisOptions(r=2)).Q.shape
    torch.Size([4, 2])
    """
    row = find_constructor(constructor)
    try:
        return row.build(layer, row.options(**vars(options)) if type(options) is BasisOptions else options)
    except CalibrationError as error:
        raise CalibrationError(f"Layer {layer.name!r}: {error}") from error
