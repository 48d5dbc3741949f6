"""docs/promises.md promises nothing that no test breaks in vain, and its figures are those on record."""

from __future__ import annotations

import json
import re

from places import ROOT

PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!promise|---)(.+) \|$", PAGE, flags=re.MULTILINE)


def test_every_promise_names_a_test_that_exists() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        found = re.search(r"`((?:lab/)?tests/\S+\.py)::(test_\w+)`", row)
        assert found, row
        source = (ROOT / found[1]).read_text(encoding="utf-8")
        assert re.search(rf"^def {found[2]}\(", source, flags=re.MULTILINE), found[0]


def test_the_fuzz_figure_is_the_recorded_one() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "fuzz.json").read_text())
    assert (
        f"{figures['tried']:,} files and folders in {len(figures['rows'])} ways, {figures['failures']} failures" in PAGE
    )
