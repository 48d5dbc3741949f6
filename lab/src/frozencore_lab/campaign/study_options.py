"""The types of a run's options in a study: one value, or the values of an axis or a grid, by name."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from frozencore.constructors import described
from frozencore.errors import ConfigError
from frozencore.options import Option
from frozencore.tune.config import PLACES, run_options
from frozencore.words import unknown_name

Value = bool | int | float | str | tuple[str, ...] | tuple[float, ...] | None
Values = Annotated[tuple[Value, ...], Field(min_length=1)]

METHODS_OF_GRID = "for"


def _options() -> dict[str, Option]:
    """The options that a campaign may set: those of the machine are the command line's."""
    return {name: option for name, option in run_options().items() if name not in PLACES}


def _option(name: str) -> str:
    if name not in (known := _options()):
        raise ConfigError(unknown_name("option", name, known))
    return name


def _option_or_for(name: str) -> str:
    return name if name == METHODS_OF_GRID else _option(name)


OptionName = Annotated[str, AfterValidator(_option)]


@dataclass(frozen=True)
class _Described:
    """Adds the values, default and help of each option to the JSON schema of a mapping from options.

    Attributes:
        listed: Each option maps to a list of values.
        also: A further key, with a list of texts.
    """

    listed: bool = False
    also: str = ""

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        known = {name: _schema(option) for name, option in _options().items()}
        if self.also:
            known[self.also] = {"type": "string"}
        if self.listed:
            known = {name: {"type": "array", "items": one, "minItems": 1} for name, one in known.items()}
        return {"type": "object", "properties": known, "additionalProperties": False}


def _schema(option: Option) -> dict[str, Any]:
    default = {} if option.default is MISSING else {"default": option.adapter.dump_python(option.default, mode="json")}
    return {**option.adapter.json_schema(), "description": described(option), **default}


Fixed = Annotated[dict[OptionName, Value], _Described()]
StudyAxes = Annotated[dict[OptionName, Values], _Described(listed=True)]
Grid = Annotated[dict[Annotated[str, AfterValidator(_option_or_for)], Values], _Described(True, METHODS_OF_GRID)]
