"""Each benchmark runs at its tiniest and writes its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from frozencore.tune.pocket import pocket_model_path
from places import ROOT

QUICK = ["--quick"]
TINY = ["--tiny", "--smollm2", str(pocket_model_path())]
WORDS = {
    "step": QUICK, "calibration": QUICK, "smollm2": QUICK, "tenants": QUICK, "many_training": QUICK,
    "many_tenants": QUICK, "tenants_quality": QUICK, "compress_quality": QUICK, "starts_quality": QUICK, "gpu": TINY,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_a_benchmark_runs_at_its_tiniest(name: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *WORDS[name], "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = out.read_text(encoding="utf-8")
    assert json.loads(lines.splitlines()[-1] if name.endswith("_quality") else lines)
    assert '"error"' not in lines
