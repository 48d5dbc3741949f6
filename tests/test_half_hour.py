"""benchmarks/house/half_hour.sh at a tiny size on the CPU: the house model, its campaign, uneven channels, the page."""

from __future__ import annotations

import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from places import ROOT, SHARED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SHARED / "corpus").is_dir(), reason="needs ../shared/corpus"),
]
PRETRAIN = (
    "--minutes 0 --vocabulary 320 --hidden 64 --intermediate 128 --layers 1 --heads 2 --key-value-heads 1 --rows 16 "
    "--length 128 --passes 0.1 --rate 1e-2 --held-out-rows 8"
)
FEW = {"num_train": 16, "num_evaluation": 4, "max_length": 96, "calibration_size": 8, "rank": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little of the corpus, and the two campaigns with one run or two of each study."""
    folder = tmp_path_factory.mktemp("half-hour")
    (folder / "corpus").mkdir()
    for name, count in (("train-00.jsonl.xz", 60), ("valid.jsonl.xz", 5)):
        with lzma.open(SHARED / "corpus" / name, "rt", encoding="utf-8") as lines:
            some = list(islice(lines, count))
        with lzma.open(folder / "corpus" / name, "wt", encoding="utf-8", preset=0) as file:
            file.writelines(some)
    (folder / "corpus" / "README.md").write_text((SHARED / "corpus" / "README.md").read_text())
    write_few("house", folder, {"task": ["svamp"], "method": ["fcca"], "seed": [42]})
    write_few("outliers", folder, {"model": ["spread-0", "spread-2"], "method": ["fcca", "rawgrad"], "seed": [42]})
    return folder


def write_few(name: str, folder: Path, axes: dict[str, list[Any]]) -> None:
    """The first study of a shipped campaign with those values, and a search of one trial."""
    campaign = yaml.safe_load((ROOT / "campaigns" / f"{name}.yaml").read_text())
    campaign["base"] |= FEW
    first = next(iter(campaign["studies"]))
    study = campaign["studies"][first]
    study["axes"] |= axes
    study.pop("search", None)
    campaign["studies"] = {first: study}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(campaign))


def half_hour(stage: str, place: Path, **more: str) -> dict[str, tarfile.TarFile]:
    """What a stage leaves in OUT, by name."""
    own = {
        "CORPUS": str(place / "corpus"), "DATA": str(SHARED / "data"), "WORK": str(place / "work"),
        "OUT": str(place / "out"),
        "PYTHON": sys.executable, "DEVICE": "cpu", "WORKERS": "0", "MODEL": "none", "PACK_EVERY": "1",
        "PRETRAIN": PRETRAIN, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = ["bash", str(ROOT / "benchmarks" / "house" / "half_hour.sh"), stage]
    done = subprocess.run(words, env=os.environ | own | more, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    parts: dict[str, bytes] = {}
    for path in sorted((place / "out").glob("*.tgz.*")):
        name = path.name.partition(".")[0]
        parts[name] = parts.get(name, b"") + path.read_bytes()
    return {name: tarfile.open(fileobj=io.BytesIO(content)) for name, content in parts.items()}


def test_the_model_its_campaign_and_the_uneven_channels_come_back_whole(place: Path) -> None:
    found = half_hour("pretrain", place)
    names = set(found["house"].getnames())
    assert {"history.jsonl", "model/config.json", "model/model.safetensors", "model/tokenizer.json"} <= names
    found = half_hour("campaign", place, CAMPAIGN=str(place / "house.yaml"))
    assert len(records(found["house-campaign"])) == 1
    assert "report/index.html" in found["house-campaign"].getnames()
    found = half_hour("outliers", place, CAMPAIGN=str(place / "outliers.yaml"))
    by_model: dict[str, list[float]] = {}
    for record in records(found["house-outliers"]):
        by_model.setdefault(record["config"]["model"], []).append(record["held_out_loss_before"])
    assert len(by_model) == 2  # the spreads, of one function
    losses = [loss for some in by_model.values() for loss in some]
    assert len(losses) == 4
    assert max(losses) - min(losses) < 1e-3


def records(tar: tarfile.TarFile) -> list[dict[str, Any]]:
    files = [tar.extractfile(name) for name in tar.getnames() if name.endswith("/result.json")]
    return [json.loads(file.read()) for file in files if file is not None]
