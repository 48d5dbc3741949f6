"""Where things lie: this checkout, its tests' data, and the folder that may be beside it."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCES = ROOT / "src"
DATA = TESTS / "data"
LAB = ROOT / "lab"
PAPER_TABLES = LAB / "tests" / "data"
SHARED = ROOT.parent / "shared"
