"""What a run may leave to its calibration rows: ``--method auto``, ``--damping auto``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from frozencore.constructors import CONSTRUCTORS, readers, refuse_unread
from frozencore.constructors.options import AUTO
from frozencore.errors import ConfigError
from frozencore.naming import flag_of
from frozencore.options import Option

if TYPE_CHECKING:
    from frozencore.lab.run.config import RunConfig

HELP_OF_OPEN = {
    "method": "auto: a core on the bases that the calibration rows speak for (docs/advise.md).",
    "damping": "auto: what the calibration rows speak for.",
}
"""What may be left open, and how its help ends."""
OPEN_OPTIONS = tuple(name for name in HELP_OF_OPEN if name != "method")
"""Those of the bases."""
_OPEN = Literal["auto"]


def left_open(config: RunConfig) -> tuple[str, ...]:
    """The options that the calibration rows are to decide, by name."""
    core = config.core.model_dump()
    return (*(("method",) if config.method == AUTO else ()), *(name for name in OPEN_OPTIONS if core[name] == AUTO))


def until_chosen(core: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the bases as constructors take them: without those that are open."""
    return {name: value for name, value in core.items() if not (name in OPEN_OPTIONS and value == AUTO)}


def may_be_left_open(options: Mapping[str, Option]) -> dict[str, Option]:
    """Options of the bases as a run takes them."""
    return {name: _or_auto(option) if name in OPEN_OPTIONS else option for name, option in options.items()}


def _or_auto(option: Option) -> Option:
    said = Field(description=f"{option.help} {HELP_OF_OPEN[option.name]}")
    kind, _ = get_args(option.type)  # beside its help, which is another here
    return replace(option, type=Annotated[kind | _OPEN, said], plain=option.plain | _OPEN)


def to_be_named(option: Option) -> Option:
    """An option of a run for who can leave nothing open: its help does not offer it."""
    if option.name not in HELP_OF_OPEN:
        return option
    said = Field(description=option.help.removesuffix(HELP_OF_OPEN[option.name]).rstrip())
    kind, _ = get_args(option.type)
    return replace(option, type=Annotated[_but_open(kind), said], plain=_but_open(option.plain))


def _but_open(kind: Any) -> Any:
    return reduce(or_, (part for part in get_args(kind) or (kind,) if part != _OPEN))


def refuse_unread_options(config: RunConfig) -> None:
    """Refuse options of the bases that the method does not read, or that one that is still open may not read.

    Raises:
        ConfigError: The first that is not at its default.
    """
    given = config.core.model_dump(exclude_defaults=True)
    if config.method != AUTO:
        refuse_unread(config.method, given)
        return
    for name, value in until_chosen(given).items():
        if len(own := readers(name)) < len(CONSTRUCTORS):
            raise ConfigError(
                f"--method auto chooses among all constructors, but {name} {value} is for {', '.join(own)}: name one "
                f"with --method, or leave {flag_of(name)} out."
            )


def refuse_what_leaves_no_choice(config: RunConfig) -> None:
    """Refuse options beside which nothing can be left open.

    Raises:
        ConfigError: A saved basis, or a memory budget.
    """
    if not (names := left_open(config)):
        return
    asked = flags_of_open(names)
    if config.basis is not None:
        raise ConfigError(f"The bases in {config.basis} are chosen: leave {asked} out.")
    if config.memory_budget is not None:
        raise ConfigError(
            f"{asked} compares bases by dense second moments of every layer, which no memory budget bounds: name what "
            "to train, or leave --memory-budget out."
        )


def refuse_open(config: RunConfig, what: str) -> None:
    """Refuse a configuration that leaves something open, where no rows are asked.

    Raises:
        ConfigError: It does.
    """
    if names := left_open(config):
        raise ConfigError(
            f"{flags_of_open(names)} is chosen by a run of `frozencore tune` for itself, but this is {what}. Name what "
            "`frozencore advise` recommends."
        )


def flags_of_open(names: tuple[str, ...]) -> str:
    """As they stand on the command line."""
    return " ".join(f"{flag_of(name)} {AUTO}" for name in names)
