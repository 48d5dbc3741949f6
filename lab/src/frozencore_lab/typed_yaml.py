"""YAML files of campaigns and tasks as typed models; an error names the line of the value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frozencore.errors import ConfigError
from frozencore.files.strict_yaml import YamlLoader, read_yaml

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
    node: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8"), Loader=YamlLoader)
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
