"""No mutated file ends a loader with anything but an error of ours; the figures of the long run are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

FIGURES = ROOT / "benchmarks" / "results" / "fuzz.json"


@pytest.mark.slow
def test_a_minute_of_mutated_files_ends_with_our_errors_only(tmp_path: Path) -> None:
    words = ["--seconds", "60", "--seed", "1", "--out", tmp_path / "fuzz.json", "--keep", tmp_path / "kept"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "fuzz.py", *map(str, words)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / "fuzz.json").read_text())["tried"] > 1000


def test_the_recorded_run_had_no_failure() -> None:
    figures = json.loads(FIGURES.read_text())
    assert figures["failures"] == 0
    assert figures["tried"] == sum(row["tried"] for row in figures["rows"])
