"""Options: fields whose type gives the allowed values, and whose description is the help.

    damping: Annotated[Damping, Field(description="Damping relative to the mean second moment.")] = 1e-3

An option is defined once, in the dataclass or pydantic model of the code that reads it. Configurations, schemas, flags
and help are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, cached_property
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from frozencore.errors import ConfigError, wrapped_error


@dataclass(frozen=True, eq=False)
class Option:
    """One option.

    Attributes:
        type: The annotated type, with bounds and description.
        plain: The type without annotations.
        default: ``dataclasses.MISSING`` for a required option.
    """

    name: str
    type: Any
    plain: Any
    default: Any = MISSING

    @property
    def help(self) -> str:
        """The description in one line."""
        return next((info.description for info in _infos(self.type) if info.description), "")

    @property
    def rule(self) -> str:
        """The allowed values in words."""
        return _in_words(self.type)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of its values, without None."""
        return tuple(kind for kind in _parts(self.plain) if kind is not NoneType)

    @property
    def may_be_none(self) -> bool:
        return NoneType in _parts(self.plain)

    @property
    def takes_several(self) -> bool:
        """Return whether a value may be a list."""
        return any(get_origin(kind) is tuple for kind in self.kinds)

    @property
    def meaning(self) -> tuple[Any, ...]:
        """A key: two options with the same name and meaning are one option."""
        return self.plain, self.default, self.help, self.rule

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """The adapter that validates values and makes the JSON schema."""
        return TypeAdapter(self.type)

    def check(self, value: Any) -> None:
        """Check a value.

        Raises:
            ConfigError: The value is not allowed; the message names the allowed values.
        """
        try:
            self.adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise wrapped_error(error.errors()[0]) or ConfigError(
                f"{self.name} must be {self.rule}, but {value!r} came."
            ) from error


def options_of(holder: type) -> Mapping[str, Option]:
    """The options of a dataclass or of a pydantic model, by name, in order."""
    return _read(holder)


@cache
def _read(holder: Any) -> Mapping[str, Option]:  # a type is hashable, which mypy does not know
    full, plain = get_type_hints(holder, include_extras=True), get_type_hints(holder)
    if issubclass(holder, BaseModel):
        defaults = {name: MISSING if f.is_required() else f.default for name, f in holder.model_fields.items()}
    else:
        defaults = {f.name: f.default for f in fields(holder)}
    found = {name: Option(name, full[name], plain[name], default) for name, default in defaults.items()}
    return MappingProxyType(found)


def check_options(holder: Any) -> None:
    """Check all values of a dataclass, as :meth:`Option.check` does."""
    for name, option in options_of(type(holder)).items():
        option.check(getattr(holder, name))


def without_lists(value: Any) -> Any:
    """Convert lists from JSON and YAML to tuples, as options hold them."""
    return tuple(value) if isinstance(value, list) else value


_NAMES = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text",
    NoneType: "none",
}  # fmt: skip


def _infos(kind: Any) -> list[FieldInfo]:
    return [extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, FieldInfo)]


def _parts(kind: Any) -> tuple[Any, ...]:
    """The types of a union; a type alone is a union of one."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _in_words(kind: Any, bounds: Sequence[Any] = ()) -> str:
    if get_origin(kind) is Annotated:
        return _in_words(get_args(kind)[0], [bound for info in _infos(kind) for bound in info.metadata])
    if len(parts := _parts(kind)) > 1:
        return " or ".join(_in_words(part, bounds) for part in parts)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        size = "" if others == [Ellipsis] else f" of {1 + len(others)}"
        return f"a list{size}, each {_in_words(first)}"
    limits = {
        name: getattr(bound, name) for bound in bounds for name in ("gt", "ge", "lt", "le") if hasattr(bound, name)
    }
    words = {"gt": "above", "ge": "from" if "le" in limits else "of at least", "lt": "below", "le": "to"}
    numbers = {name: limit if isinstance(limit, int) else f"{limit:g}" for name, limit in limits.items()}
    said = [f"{words[name]} {numbers[name]}" for name in words if name in limits and kind in (int, float)]
    return " ".join([_NAMES.get(kind, str(kind)), *said])
