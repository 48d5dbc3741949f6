"""Move files to a GPU's machine and back for benchmarks/gpu_session.py: wheels, a model in parts, data, results."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (  # pinned in constraints.txt; without what they need, which such a machine has
    "transformers", "tokenizers", "huggingface_hub", "httpx2", "httpcore2", "truststore", "idna", "peft", "datasets",
    "dill", "multiprocess", "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "gguf", "torchao",
    "beartype",
)  # fmt: skip
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
RESULTS = ("gpu.json", "workers.json", "suite.txt")


def pack(folder: Path, model: Path, data_root: Path, part_bytes: int, packages: Sequence[str]) -> None:
    """Write what is to be carried: ``base`` with wheels and data, and a folder for each part of the model's file."""
    content = model.read_bytes()
    parts = [content[start : start + part_bytes] for start in range(0, len(content), part_bytes)]
    for number, part in enumerate(parts):
        place = folder / f"model-{number}"
        place.mkdir(parents=True)
        (place / f"part-{number:02}").write_bytes(part)
    whole = {"name": model.name, "parts": len(parts), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "base").mkdir()
    (folder / "base" / "model.json").write_text(json.dumps(whole))
    shutil.copytree(data_root, folder / "base" / "data")
    if packages:
        download(packages, folder / "base" / "wheels")
    for place in sorted(folder.iterdir()):
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        print(f"{place}: {size / 2**20:.1f} MiB")


def download(packages: Sequence[str], folder: Path) -> None:
    """Wheels of the pinned versions for Python 3.12 on Linux, whatever runs here."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms]
    where = ["--python-version", "3.12", "--implementation", "cp", "--dest", str(folder)]
    subprocess.run([*pip, *where, *(f"{name}=={pins[name]}" for name in packages)], check=True)


def take_over(folder: Path, place: Path) -> None:
    """Copy what came with this call to where it stays for the next ones."""
    for part in sorted(folder.iterdir()):
        if part.name == "base" or part.name.startswith("model-"):
            shutil.copytree(part, place, dirs_exist_ok=True)


def joined(place: Path) -> Path:
    """The model's file from its parts.

    Raises:
        SystemExit: Some parts have not come yet, or they do not make the file.
    """
    whole = json.loads((place / "model.json").read_text()) if (place / "model.json").exists() else {"parts": 1}
    parts = sorted(place.glob("part-*"))
    if len(parts) < whole["parts"] or "name" not in whole:
        raise SystemExit(f"The model needs base and {whole['parts']} parts, but {len(parts)} came. Carry the others.")
    content = b"".join(part.read_bytes() for part in parts)
    if hashlib.sha256(content).hexdigest() != whole["sha256"]:
        raise SystemExit(f"The parts are not those of {whole['name']}. Pack them again, and carry them all.")
    (place / whole["name"]).write_bytes(content)
    return place / whole["name"]


def unpack_results(folder: Path, place: Path) -> None:
    """Put results that came back where they were, unless newer ones are there."""
    for name in RESULTS:
        if (folder / name).exists() and not (place / name).exists():
            shutil.copyfile(folder / name, place / name)
    for archive in folder.glob("*.tar.xz"):
        if not (place / archive.name.removesuffix(".tar.xz")).exists():
            with tarfile.open(archive) as packed:
                packed.extractall(place, filter="data")


def take(folder: Path, place: Path) -> None:
    """Put results that came back where pages are made from: gpu.json, and the campaign's records and report."""
    shutil.copyfile(folder / "gpu.json", place / "benchmarks" / "results" / "gpu.json")
    for archive in folder.glob("*.tar.xz"):
        with tarfile.open(archive) as packed:
            packed.extractall(place / "lab" / "results", filter="data")
    print("Now: python benchmarks/pages.py, and frozencore campaign report lab/results/smollm2-gpu")
