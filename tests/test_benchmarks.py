"""Each benchmark runs at its tiniest and writes its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures import ROOT
from frozencore.tune.pocket import pocket_model_path

LINES = ("datasets_quality", "few_bits", "tenants_quality", "rates")
"""Programs that write a line for each measurement."""
PROGRAMS = (
    "step",
    "calibration",
    "smollm2",
    "tenants",
    "bank_bits",
    "strangers",
    "many_training",
    "many_tenants",
    "devices",
)
WORDS = {name: [name] for name in PROGRAMS} | {
    "rates": ["rates", "--rates", "1e-2", "--lora-rates", "1e-3"],
    "datasets": ["datasets_quality"],
    "bits": ["few_bits"],
    "gpu": ["gpu", "--smollm2", str(pocket_model_path())],
    **{study: ["tenants_quality", study] for study in ("sharing", "starts", "compress")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_a_benchmark_runs_at_its_tiniest(name: str, tmp_path: Path) -> None:
    if name == "devices":
        pytest.importorskip("onnxruntime_genai", reason="pip install 'frozencore[onnx]'")
    out = tmp_path / "found.json"
    program, *words = WORDS[name]
    words = [sys.executable, str(ROOT / "benchmarks" / f"{program}.py"), *words, "--quick", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = out.read_text(encoding="utf-8")
    assert json.loads(lines.splitlines()[-1] if program in LINES else lines)
    assert '"error"' not in lines
