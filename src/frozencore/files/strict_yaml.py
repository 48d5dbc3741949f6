"""Strict YAML: ``1e-3`` is a number, a repeated key is an error, and no code can run."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frozencore.errors import ConfigError
from frozencore.text import one_line


class _Loader(yaml.SafeLoader):
    """A loader that reads ``1e-3`` as a number, as YAML 1.2 does, and ``010``, ``1:30`` and ``1_0`` as words.

    In YAML 1.1 the first needs a point and a sign, and the others are 8, 90 and 10.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9]\d*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(?:\d+\.\d*|\.\d+|(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in rules if tag not in _NUMBERS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _form in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, _form, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which this or another reader of YAML would take for a number, as ``12e3``."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBERS["tag:yaml.org,2002:float"], list("-+.0123456789"))


def as_yaml(content: Any) -> str:
    """Write plain values as YAML, in their order."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        ConfigError: There is no such file, or it is not YAML; the message names the line.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML raises a KeyError for `!!bool maybe`, a ValueError for 2020-13-45, and so on
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or one_line(error, 200)
        raise ConfigError(f"{path}{where}: {reason}. Give a YAML file in UTF-8.") from error


Typed = TypeVar("Typed", bound=BaseModel)


def read_typed(path: Path, kind: type[Typed], *, holds: str, see: str = "") -> Typed:
    """Read a YAML file as a typed model.

    Args:
        holds: A description of the content, for errors.
        see: The last sentence of errors, which names the place where the keys are explained.

    Raises:
        ConfigError: A value is wrong; the message names its line.
    """
    content = read_yaml(path)
    try:  # through JSON, in which a list may become a tuple and text never becomes a number
        return kind.model_validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        first = most_specific(error)
        loc = _keys_on_the_way(content, first["loc"])
        missing = first["loc"][-1:] if first["type"] == "missing" else ()
        keys = ", ".join(name for name, field in kind.model_fields.items() if field.is_required())
        reason: object = wrapped_error(first)
        if not isinstance(content, dict):
            reason = f"must hold {holds}: {keys}. {see}"
        elif reason is None:
            given = "" if missing else f", but {first['input']!r} was given"
            reason = f"{'.'.join(map(str, (*loc, *missing)))}: {first['msg'].lower()}{given}. {see}"
        else:
            reason = f"{'.'.join(map(str, loc))}: {reason}" if loc else reason
        where = f", line {line_of(path, loc)}" if loc else ""
        raise ConfigError(f"{path}{where}: {reason}") from error


def _keys_on_the_way(content: Any, loc: tuple[int | str, ...]) -> list[int | str]:
    """The parts of pydantic's location that are keys or positions in the file, without pydantic's type names."""
    keys: list[int | str] = []
    for part in loc:
        inside = dict(enumerate(content)) if isinstance(content, list) else content
        if isinstance(inside, dict) and part in inside:
            content = inside[part]
            keys.append(part)
    return keys


def line_of(path: Path, keys: Sequence[int | str]) -> int:
    """The line, from 1, of the value under nested keys and positions, or of the innermost existing one."""
    node: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    line = 0
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == str(key)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            pair = (node.value[key], node.value[key])
        else:
            pair = None
        if pair is None:
            break
        line, node = pair[0].start_mark.line, pair[1]
    return line + 1


def wrapped_error(error: ErrorDetails) -> ConfigError | None:
    """The frozencore error behind a pydantic error, if there is one."""
    refused = error.get("ctx", {}).get("error")
    return refused if isinstance(refused, ConfigError) else None


def most_specific(error: ValidationError) -> ErrorDetails:
    """The first error; for a value that fits none of several types, the error of the nearest type, or of all."""
    first, *others = error.errors()
    siblings = [first, *(other for other in others if other["loc"][:-1] == first["loc"][:-1])]
    words = next((one for one in siblings if one["type"] == "literal_error"), None)
    if words is not None and (other := next((one for one in siblings if one["type"].endswith("_type")), None)):
        return {**other, "msg": f"{other['msg']} or {words['ctx']['expected']}"}
    return next((one for one in siblings if not one["type"].endswith("_type")), first)
