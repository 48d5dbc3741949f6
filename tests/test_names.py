"""One word, one thing."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "src" / "frozencore", ROOT / "lab" / "src" / "frozencore_lab")


def types_in(file: Path) -> Iterator[str]:
    """The classes and the named types at the top of a file."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name) and re.match("[A-Z][a-z]", t.id))


def test_no_two_types_bear_one_name() -> None:
    places = defaultdict(list)
    for file in (file for source in SOURCES for file in sorted(source.rglob("*.py"))):
        for name in types_in(file):
            places[name].append(str(file.relative_to(ROOT)))
    assert len(places) > 100
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
