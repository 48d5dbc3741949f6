"""Which values of a test's parameter only slow runs try."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], *fast: Any) -> list[Any]:
    """All values of a parameter, of which only these are tried in fast tests."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
