"""benchmarks/half_hour.sh at a tiny size on the CPU: a campaign, and the campaign of uneven channels."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from frozencore.tune.pocket import pocket_model_path
from places import LAB, ROOT, SHARED

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs ../shared/data")]
FEW = {"num_train": 16, "num_evaluation": 4, "max_length": 96, "calibration_size": 8, "rank": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shipped campaigns with one run or two of their first study."""
    folder = tmp_path_factory.mktemp("half-hour")
    write_few("pocket", folder, {"task": ["pocket-math"], "method": ["fcca"], "seed": [42]})
    write_few("outliers", folder, {"model": ["spread-0", "spread-2"], "method": ["fcca", "rawgrad"], "seed": [42]})
    return folder


def write_few(name: str, folder: Path, axes: dict[str, list[Any]]) -> None:
    """The first study of a shipped campaign with those values, and a search of one trial."""
    campaign = yaml.safe_load((LAB / "campaigns" / f"{name}.yaml").read_text())
    campaign["base"] |= FEW
    first = next(iter(campaign["studies"]))
    study = campaign["studies"][first]
    study["axes"] |= axes
    study.pop("search", None)
    campaign["studies"] = {first: study}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(campaign))


def half_hour(place: Path, *stage: str, **more: str) -> dict[str, tarfile.TarFile]:
    """The archives that a stage leaves in OUT, by name."""
    own = {
        "DATA": str(SHARED / "data"), "WORK": str(place / "work"), "OUT": str(place / "out"),
        "PYTHON": sys.executable, "DEVICE": "cpu", "WORKERS": "0", "PACK_EVERY": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = ["bash", str(ROOT / "benchmarks" / "half_hour.sh"), *stage]
    done = subprocess.run(words, env=os.environ | own | more, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    parts: dict[str, bytes] = {}
    for path in sorted((place / "out").glob("*.tgz.*")):
        name = path.name.partition(".")[0]
        parts[name] = parts.get(name, b"") + path.read_bytes()
    return {name: tarfile.open(fileobj=io.BytesIO(content)) for name, content in parts.items()}


def test_a_campaign_and_the_uneven_channels_come_back_whole(place: Path) -> None:
    found = half_hour(place, "campaign", str(place / "pocket.yaml"))
    assert len(records(found["pocket"])) == 1
    assert "report/index.html" in found["pocket"].getnames()
    model, campaign = str(pocket_model_path()), str(place / "outliers.yaml")
    found = half_hour(place, "outliers", MODEL=model, CAMPAIGN=campaign)
    by_model: dict[str, list[float]] = {}
    for record in records(found["outliers"]):
        by_model.setdefault(record["config"]["model"], []).append(record["held_out_loss_before"])
    assert len(by_model) == 2  # the spreads, of one function
    losses = [loss for some in by_model.values() for loss in some]
    assert len(losses) == 4
    assert max(losses) - min(losses) < 1e-3


def records(tar: tarfile.TarFile) -> list[dict[str, Any]]:
    files = [tar.extractfile(name) for name in tar.getnames() if name.endswith("/result.json")]
    return [json.loads(file.read()) for file in files if file is not None]
