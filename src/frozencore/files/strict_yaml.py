"""Strict YAML: ``1e-3`` is a number, a repeated key is an error, and no code can run."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frozencore.errors import ConfigError
from frozencore.text import one_line


class _Loader(yaml.SafeLoader):
    """A loader that reads ``1e-3`` as a number, as YAML 1.2 does; YAML 1.1 needs a point and a sign."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse deep nesting at once; PyYAML takes a second to exhaust its stack."""
        if self.depth >= DEEPEST:
            raise yaml.MarkedYAMLError(
                problem=f"values are nested deeper than {DEEPEST}", problem_mark=self.peek_event().start_mark
            )
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


LARGEST_FILE = 2**20
DEEPEST = 40
MOST_NODES = 100_000  # aliases of aliases expand to any size


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        ConfigError: There is no such file, it is too large, or it is not YAML; the message names the line.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{path} is larger than {LARGEST_FILE:,} bytes: it is not a file written by hand.")
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _expanded_size(root, {}, ()) > MOST_NODES:
            raise ConfigError(f"The aliases in {path} expand to more than {MOST_NODES:,} values. Write it out.")
        return loader.construct_document(root)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"There is no file {path}. Give the path of a YAML file.") from error
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{path}{line}: {error.problem or error.context}. Correct the YAML.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply. Write it flatter.") from error
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML raises a KeyError for `!!bool maybe`, a ValueError for 2020-13-45, and so on
        raise ConfigError(f"{path} is not YAML in UTF-8: {one_line(error, 200)}") from error


Typed = TypeVar("Typed", bound=BaseModel)


def read_typed(path: Path, kind: type[Typed], *, holds: str, see: str = "") -> Typed:
    """Read a YAML file as a typed model.

    Args:
        holds: A description of the content, for errors.
        see: The last sentence of errors, which says where the keys are explained.

    Raises:
        ConfigError: A value is wrong; the message names its line.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        keys = ", ".join(name for name, field in kind.model_fields.items() if field.is_required())
        raise ConfigError(f"{path} must hold {holds}: {keys}. {see}")
    try:  # through JSON, in which a list may become a tuple and text never becomes a number
        return kind.model_validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        first = most_specific(error)
        loc = _keys_on_the_way(content, first["loc"])
        missing = first["loc"][-1:] if first["type"] == "missing" else ()
        where = f"{path}, line {line_of(path, loc)}: {'.'.join(map(str, (*loc, *missing)))}"
        if (refused := wrapped_error(first)) is not None:
            raise ConfigError(f"{where}: {refused}") from error
        came = "" if missing else f", but {first['input']!r} came"
        raise ConfigError(f"{where}: {first['msg'].lower()}{came}. {see}") from error


def _keys_on_the_way(content: Any, loc: tuple[int | str, ...]) -> list[int | str]:
    """The parts of pydantic's location that are keys or positions in the file, without pydantic's type names."""
    found: list[int | str] = []
    for part in loc:
        inside = dict(enumerate(content)) if isinstance(content, list) else content
        if isinstance(inside, dict) and part in inside:
            content = inside[part]
            found.append(part)
    return found


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


def _expanded_size(node: yaml.Node, sizes: dict[int, int], above: tuple[int, ...]) -> int:
    """The number of values under a node with all aliases expanded."""
    if id(node) in above:
        raise yaml.MarkedYAMLError(problem="an alias stands inside of what it names", problem_mark=node.start_mark)
    if id(node) not in sizes:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes, (*above, id(node))) for child in children)
    return sizes[id(node)]


def require_text_keys(path: Path, content: Iterable[Any]) -> None:
    """Refuse a name that YAML reads as a number, a date or a truth value: ``007`` is 7, and ``no`` is false."""
    for name in content:
        if not isinstance(name, str):
            raise ConfigError(
                f"{path} must name tenants in text, but YAML reads one of its names as {name!r}. Quote it."
            )


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
