"""YAML as people mean it: ``1e-3`` is a number, a key given twice is an error, and nothing in it can run code."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from frozencore.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-3`` as text, because it wants a point and a sign; YAML 1.2 reads a number."""

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


def read_yaml(path: Path) -> Any:
    """What a YAML file says.

    Raises:
        ConfigError: In one line, that there is no such file, or on which line it is no YAML.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return yaml.load(file, Loader=_Loader)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"There is no file {path}. Give the path of a YAML file.") from error
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{path}{line}: {error.problem or error.context}. Correct the YAML.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML in UTF-8: {' '.join(str(error).split())[:200]}") from error
