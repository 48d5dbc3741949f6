"""The examples in docstrings of the maths, the constructors and the calibration run and show what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

ROOMS = ("frozencore.maths", "frozencore.constructors", "frozencore.calibration")
MODULES = [
    name
    for room in ROOMS
    for name in (room, *(f"{room}.{module.name}" for module in iter_modules(import_module(room).__path__)))
]


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    assert sum(len(test.examples) > 0 for name in MODULES for test in finder.find(import_module(name))) > 25


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_show_what_they_say(module: str) -> None:
    assert doctest.testmod(import_module(module), extraglobs={"torch": torch}).failed == 0
