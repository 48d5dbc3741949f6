"""Strict YAML: ``1e-3`` is a number, a repeated key is an error, and no code can run."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from frozencore.errors import ConfigError
from frozencore.text import one_line


class YamlLoader(yaml.SafeLoader):
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
YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in rules if tag not in _NUMBERS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _form in _NUMBERS.items():
    YamlLoader.add_implicit_resolver(_tag, _form, list("-+.0123456789"))


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
        return yaml.load(path.read_text(encoding="utf-8"), Loader=YamlLoader)
    except (yaml.YAMLError, OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML raises a KeyError for `!!bool maybe`, a ValueError for 2020-13-45, and so on
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or one_line(error, 200)
        raise ConfigError(f"{path}{where}: {reason}. Give a YAML file in UTF-8.") from error
