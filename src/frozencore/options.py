"""Options: dataclass fields whose annotation holds the allowed values and the line of help.

    damping: Annotated[Damping, "Damping relative to the mean second moment."] = 1e-3

An option is declared once, in the dataclass of the code that reads it. The configuration for PEFT inherits these
dataclasses; a run's configuration, its flags, YAML keys, help and schema are walks over their fields.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from frozencore.errors import ConfigError
from frozencore.text import flag_of


@dataclass(frozen=True)
class Bounds:
    """The allowed range of a number, or the fewest items of a list, as metadata of an ``Annotated`` type."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    min_items: int = 0

    def hold(self, number: float) -> bool:
        """Return whether a number is finite and within the bounds."""
        return (
            math.isfinite(number)
            and (self.gt is None or number > self.gt)
            and (self.ge is None or number >= self.ge)
            and (self.lt is None or number < self.lt)
            and (self.le is None or number <= self.le)
        )


COMMAND_NAMES = {"r": "rank", "target_modules": "targets"}
"""The options whose names in Python are PEFT's; flags, YAML keys and records have ours."""
FREE = Bounds()
_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "none", Path: "a path",
}  # fmt: skip
_LIMITS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "to"}
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
_JSON_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


@dataclass(frozen=True, eq=False)
class Option:
    """One option.

    Attributes:
        type: The annotated type, with bounds and help.
        default: ``dataclasses.MISSING`` for a required option.
    """

    name: str
    type: Any
    default: Any

    @property
    def help(self) -> str:
        """The line of help; empty for a field that is no option."""
        return next((text for text in getattr(self.type, "__metadata__", ()) if isinstance(text, str)), "")

    @cached_property
    def alternatives(self) -> tuple[tuple[Any, Bounds], ...]:
        """The types of its values, each with its bounds."""
        return tuple(_alternatives(self.type))

    @cached_property
    def rule(self) -> str:
        """The allowed values in words."""
        return " or ".join(_in_words(kind, bounds) for kind, bounds in self.alternatives)

    @property
    def text_rule(self) -> str:
        """The allowed values of a flag: none is no text where it is the default."""
        return self.rule if self.default is not None else self.rule.removesuffix(" or none")

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of its values, without None."""
        return tuple(kind for kind, _ in self.alternatives if kind is not NoneType)

    @property
    def may_be_none(self) -> bool:
        return any(kind is NoneType for kind, _ in self.alternatives)

    @property
    def takes_several(self) -> bool:
        """Return whether a value may be a list."""
        return any(get_origin(kind) is tuple for kind in self.kinds)

    @property
    def is_repeated(self) -> bool:
        """Return whether its flag is repeated for each value, because a value (a file name) may hold a comma."""
        return self.takes_several and str in self.kinds

    @property
    def meaning(self) -> tuple[Any, ...]:
        """A key: two options with the same name and meaning are one option."""
        return self.type, self.default

    def validate(self, value: Any, name: str | None = None) -> Any:
        """Return a Python, JSON or YAML value as the option's type: a list as a tuple, a whole number as a float.

        Raises:
            ConfigError: The value is not allowed; the message has ``name`` and the allowed values.
        """
        return self._checked(value, name or self.name, self.rule)

    def parse(self, given: Any, name: str) -> Any:
        """Return a flag's text, or the texts of a repeated flag, as the option's type.

        Raises:
            ConfigError: As :meth:`validate`.
        """
        if given in (None, []) or (given == "none" and self.default is not None and self.may_be_none):
            return None
        return self._checked(given, name, self.text_rule, is_text=True)

    def _checked(self, value: Any, name: str, rule: str, *, is_text: bool = False) -> Any:
        try:
            return _converted(self.alternatives, value, is_text=is_text)
        except ValueError:
            raise ConfigError(f"{name} must be {rule}, but {value!r:.200} was given.") from None

    def json_schema(self) -> dict[str, Any]:
        """The allowed values as a JSON schema."""
        parts = [_schema(kind, bounds) for kind, bounds in self.alternatives]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}


def options_of(holder: type) -> Mapping[str, Option]:
    """The fields of a dataclass as options by name, in order."""
    return _read(holder)


@cache
def _read(holder: Any) -> Mapping[str, Option]:
    types = get_type_hints(holder, include_extras=True)
    return MappingProxyType({f.name: Option(f.name, types[f.name], f.default) for f in fields(holder)})


def check_options(holder: Any) -> None:
    """Check the values of a dataclass, and put each in the form of its type (lists become tuples).

    Raises:
        ConfigError: A value is not allowed; the message names the option and the allowed values.
    """
    for name, option in options_of(type(holder)).items():
        object.__setattr__(holder, name, option.validate(getattr(holder, name)))  # a frozen one too


@dataclass(frozen=True, kw_only=True)
class ConfigPart:
    """Options that are checked once and do not change."""

    def __post_init__(self) -> None:
        check_options(self)

    def refuse_changed(self, names: Iterable[str], why: str) -> None:
        """Raise a ``ConfigError`` for the first of these options that is not at its default."""
        for name in names:
            if getattr(self, name) != options_of(type(self))[name].default:
                name = COMMAND_NAMES.get(name, name)
                raise ConfigError(why.format(name=name, flag=flag_of(name)))


def fingerprint_options(options: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON-like mapping, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(options, sort_keys=True, allow_nan=False).encode()).hexdigest()


def without_lists(value: Any) -> Any:
    """Convert lists from JSON and YAML to tuples, as options hold them."""
    return tuple(value) if isinstance(value, list) else value


def _alternatives(kind: Any, bounds: Bounds = FREE) -> Iterator[tuple[Any, Bounds]]:
    """The types of a union, each with its bounds; a type alone is a union of one."""
    if get_origin(kind) is Annotated:
        inner, *metadata = get_args(kind)
        yield from _alternatives(inner, next((one for one in metadata if isinstance(one, Bounds)), bounds))
    elif get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from _alternatives(part, bounds)
    else:
        yield kind, bounds


def _converted(alternatives: Iterable[tuple[Any, Bounds]], value: Any, *, is_text: bool = False) -> Any:
    """The value as the first type of a union that takes it; the words of a ``Literal`` come before other types."""
    for part, bounds in sorted(alternatives, key=lambda one: get_origin(one[0]) is not Literal):
        try:
            return _as_text_of(part, bounds, value) if is_text else _as_value_of(part, bounds, value)
        except ValueError:
            continue
    raise ValueError


def _as_value_of(kind: Any, bounds: Bounds, value: Any) -> Any:
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_converted(_alternatives(part), one) for part, one in _items(kind, bounds, value))
    if get_origin(kind) is Literal and any(type(one) is type(value) and one == value for one in get_args(kind)):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and bounds.hold(value):
        return float(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and bounds.hold(value):
        return value
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is str and isinstance(value, Path):
        return str(value)
    plain = get_origin(kind) or kind
    if isinstance(plain, type) and plain not in (int, float, tuple) and isinstance(value, plain):
        return value
    raise ValueError


def _as_text_of(kind: Any, bounds: Bounds, given: Any) -> Any:
    if get_origin(kind) is tuple:
        parts = given.split(",") if isinstance(given, str) else given
        texts = [part.strip() if isinstance(given, str) else part for part in parts]
        items = _items(kind, bounds, [*filter(None, texts)])
        return tuple(_converted(_alternatives(part), one, is_text=True) for part, one in items)
    if get_origin(kind) is Literal:
        return _as_value_of(kind, bounds, next((one for one in get_args(kind) if str(one) == given), given))
    return _as_value_of(kind, bounds, kind(given) if kind in (int, float) and isinstance(given, str) else given)


def _items(kind: Any, bounds: Bounds, values: Any) -> Iterator[tuple[Any, Any]]:
    """Each value of a list with its type."""
    parts = get_args(kind)
    parts = parts[:1] * len(values) if parts[-1] is Ellipsis else parts
    if len(values) < bounds.min_items:
        raise ValueError
    return zip(parts, values, strict=True)


def _in_words(kind: Any, bounds: Bounds) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        size = "" if others == [Ellipsis] else f" of {1 + len(others)}"
        return f"a list{size}, each {' or '.join(_in_words(*part) for part in _alternatives(first))}"
    limits = _limits_of(kind, bounds)
    words = {**_LIMITS, "ge": "from"} if "le" in limits else _LIMITS
    numbers = {name: str(limit) if isinstance(limit, int) else f"{limit:g}" for name, limit in limits.items()}
    return " ".join([_WORDS.get(kind, str(kind)), *(f"{words[name]} {number}" for name, number in numbers.items())])


def _schema(kind: Any, bounds: Bounds) -> dict[str, Any]:
    if get_origin(kind) is Literal:
        words = list(get_args(kind))
        return {**({"const": words[0]} if len(words) == 1 else {"enum": words}), "type": _JSON_TYPES[type(words[0])]}
    if get_origin(kind) is tuple:
        first, *others = (Option("", part, MISSING).json_schema() for part in get_args(kind) if part is not Ellipsis)
        if others:
            return {"maxItems": 1 + len(others), "minItems": 1 + len(others), "prefixItems": [first, *others],
                    "type": "array"}  # fmt: skip
        return {"items": first, "type": "array", **({"minItems": bounds.min_items} if bounds.min_items else {})}
    if kind is Path:
        return {"format": "path", "type": "string"}
    limits = {_JSON_LIMITS[name]: limit for name, limit in _limits_of(kind, bounds).items()}
    return {"type": _JSON_TYPES[kind], **limits}


def _limits_of(kind: Any, bounds: Bounds) -> dict[str, float]:
    return {name: limit for name in _LIMITS if kind in (int, float) and (limit := getattr(bounds, name)) is not None}
