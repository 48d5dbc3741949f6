"""docs/maths.md names functions and tests: each of them exists."""

from __future__ import annotations

import importlib
import re

import pytest

from places import ROOT

PAGE = (ROOT / "docs" / "maths.md").read_text(encoding="utf-8")
FUNCTIONS = sorted(set(re.findall(r"`(frozencore(?:\.\w+)+)`", PAGE)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]*test_\w+\.py(?:::\w+)?)`", PAGE)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_said_to_compute_an_equation_is_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", TESTS)
def test_what_is_said_to_prove_it_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {function}\(" if function else r"^def test_", text, flags=re.MULTILINE)


def test_every_constructor_of_the_table_is_on_the_page() -> None:
    from frozencore.constructors import CONSTRUCTORS

    assert all(f"frozencore.constructors.{name}.{name}_basis" in FUNCTIONS for name in CONSTRUCTORS)


def test_every_line_of_algorithm_one_but_its_loop_heads_and_ends_has_a_row() -> None:
    rows = re.findall(r"^\| (\d+)(?:-(\d+))? \|", PAGE, flags=re.MULTILINE)
    lines = {line for first, last in rows for line in range(int(first), int(last or first) + 1)}
    assert lines == {*range(1, 9), *range(12, 17), 18}
