"""A basis constructor from outside of the package."""

from __future__ import annotations

from typing import Any

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.option_fields import add_option_fields
from frozencore.constructors import CONSTRUCTORS, BasisOptions, Constructor, constructor_options
from frozencore.errors import ConfigError
from frozencore.options import options_of


def register_constructor(name: str, row: Constructor[Any]) -> None:
    """Enter a basis constructor of your own into the table: it is then as those that are in it.

    Its options are fields of :class:`FrozenCoreConfig`, and with the lab keys of campaigns and flags of ``tune``.

    Raises:
        ConfigError: The name is taken, or that of an option means something else already.
    """
    held, known = FrozenCoreConfig.__dataclass_fields__, constructor_options()
    taken = [
        own
        for own, option in options_of(row.options).items()
        if own not in options_of(BasisOptions) and own in held
        if own not in known or known[own].meaning != option.meaning
    ]
    if name in CONSTRUCTORS or taken:
        raise ConfigError(
            f"A constructor and its options have names of their own, but {(taken or [name])[0]!r} is taken. Rename it."
        )
    CONSTRUCTORS[name] = row
    add_option_fields(FrozenCoreConfig)
