"""Where things lie: this checkout, its tests' data, and the folder that may be beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCES = ROOT / "src"
DATA = TESTS / "data"
LAB = ROOT / "lab"
PAPER_TABLES = LAB / "tests" / "data"
SHARED = ROOT.parent / "shared"


def smollm2_or_skip() -> Path:
    """The folder that ``make smollm2`` writes; a test is skipped without it."""
    from frozencore.errors import ModelError  # later: conftest checks shapes in what is imported after this file
    from frozencore.tune.smollm2 import smollm2_path

    try:
        return smollm2_path()
    except ModelError as error:
        pytest.skip(str(error))
