"""PEFT's own tests, as its source distribution on the package index ships them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Iterable
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path

CACHE = Path(__file__).parents[1] / "build" / "conformance"  # ignored by git
QUANTISERS = ("bitsandbytes", "torchao")


def fetch_tests() -> Path:
    """The unpacked source distribution of the installed PEFT; downloaded once.

    Raises:
        SystemExit: The index cannot be reached or has no source distribution of that version.
    """
    name = f"peft-{version('peft')}"
    folder = CACHE / name
    if not (folder / "tests").is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        options = ["--no-binary", ":all:", "--dest", str(CACHE), f"peft=={version('peft')}"]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        archive = CACHE / f"{name}.tar.gz"
        if not archive.is_file():
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise SystemExit(
                f"The package index did not give {name}.tar.gz ({reason}). Check the network and try again."
            )
        with tarfile.open(archive) as opened:
            opened.extractall(CACHE, filter="data")
    return folder


def fetch_quantisers() -> Path:
    """Where bitsandbytes and torchao lie, beside the environment, if it lacks them.

    The suite tests every quantiser that it can import; without any, its quantisation tests are counted as excluded.
    """
    folder = CACHE / "quantisers"
    missing = [name for name in QUANTISERS if find_spec(name) is None]
    if missing and not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), *missing], capture_output=True)
    return folder


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Versions of installed packages; those that are missing are left out."""
    path = [*sys.path, str(CACHE / "quantisers")]
    found = {name: next(iter(distributions(name=name, path=path)), None) for name in names}
    return {name: package.version for name, package in found.items() if package is not None}
