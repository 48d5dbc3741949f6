"""benchmarks/gpu_session.py: what it says, what it carries, and (slow) a whole session at a tiny size on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from frozencore.tune.pocket import pocket_model_path
from places import LAB, ROOT, SHARED

PROGRAM = ROOT / "benchmarks" / "gpu_session.py"


@pytest.fixture
def carry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_carry  # type: ignore[import-not-found]  # a script

    yield gpu_carry
    sys.modules.pop("gpu_carry", None)


def session(*words: str | Path) -> str:
    done = subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return done.stdout


def test_the_dry_run_says_every_piece_and_how_long_it_takes() -> None:
    said = session("plan", "--seconds", "540")
    for name in ("install", "gpu", "workers", "tests", "campaign"):
        assert any(line.startswith(name) and " s  " in line for line in said.splitlines()), name
    assert "in 4 calls of 540 s" in said


def test_a_model_travels_in_parts_and_is_whole_again(carry: Any, tmp_path: Path) -> None:
    content = bytes(range(256)) * 100
    (tmp_path / "some.gguf").write_bytes(content)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").write_text("rows")
    packed, there = tmp_path / "packed", tmp_path / "there"
    carry.pack(packed, tmp_path / "some.gguf", tmp_path / "data", 9000, ())
    assert sorted(place.name for place in packed.iterdir()) == ["base", "model-0", "model-1", "model-2"]
    first, second = tmp_path / "first", tmp_path / "second"  # two calls, which bring some of it each
    for place, names in ((first, ("base", "model-0")), (second, ("model-1", "model-2"))):
        place.mkdir()
        for name in names:
            (packed / name).rename(place / name)
    carry.take_over(first, there)
    with pytest.raises(SystemExit, match="needs base and 3 parts, but 1 came"):
        carry.joined(there)
    carry.take_over(second, there)
    assert carry.joined(there).read_bytes() == content
    assert (there / "data" / "rows").read_text() == "rows"
    (there / "part-01").write_bytes(b"other")
    with pytest.raises(SystemExit, match="are not those of some.gguf"):
        carry.joined(there)


def test_every_package_that_travels_is_pinned(carry: Any) -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert not set(carry.PACKAGES) - pinned


def few(place: Path) -> Path:
    """The shipped campaign with one method, one seed and a few rows in each study."""
    campaign = yaml.safe_load((LAB / "campaigns" / "smollm2-gpu.yaml").read_text())
    campaign["base"] |= {"num_train": 16, "num_evaluation": 4, "max_length": 96, "truncate": True, "epochs": 1}
    campaign["base"] |= {"calibration_size": 8, "rank": 4}
    campaign["base"].pop("paper_steps")
    study = campaign["studies"]["four-bits"]
    study["axes"] |= {"task": ["sst2"], "method": ["fcca"], "seed": [42]}
    study.pop("variants")
    campaign["studies"] = {"four-bits": study}
    (place / "smollm2-gpu.yaml").write_text(yaml.safe_dump(campaign))
    return place / "smollm2-gpu.yaml"


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs ../shared/data")
def test_a_session_does_all_pieces_once_goes_on_elsewhere_and_its_results_come_back(tmp_path: Path) -> None:
    """On the pocket model, in full and in 4 bits."""
    pytest.importorskip("torchao")
    words = ["--tiny", "--model", pocket_model_path(), "--data-root", SHARED / "data", "--campaign", few(tmp_path)]
    words += ["--workers", "1", "--out", tmp_path / "out"]
    pieces = ("install", "gpu", "workers", "tests")
    first = session("run", *words, "--work", tmp_path / "one", "--pieces", *pieces)
    assert [name for name in pieces if f"{name}: " in first] == list(pieces)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"gpu.json", "workers.json", "suite.txt"}
    assert json.loads((tmp_path / "out" / "workers.json").read_text())["runs_a_minute"]["1"] > 0
    measured = json.loads((tmp_path / "out" / "gpu.json").read_text())["models"]
    assert set(measured["SmolLM2-135M"]["race"]) == {"floor", "lora", "dora", "pissa", "frozencore"}

    moved = (*words, "--work", tmp_path / "two", "--carried", tmp_path / "out")
    second = session("run", *moved, "--pieces", *(name for name in (*pieces, "campaign") if name != "gpu"))
    assert "workers: " not in second
    assert "tests: " not in second
    assert "campaign: " in second
    (tmp_path / "there" / "benchmarks" / "results").mkdir(parents=True)
    session("take", tmp_path / "out", "--place", tmp_path / "there")
    records = list((tmp_path / "there" / "lab" / "results" / "smollm2-gpu").glob("runs/*/result.json"))
    found = [json.loads(record.read_text()) for record in records]
    assert len(found) == 2
    assert len({record["model_bytes"] for record in found}) == 2
    assert not list((tmp_path / "there").rglob("adapter"))
