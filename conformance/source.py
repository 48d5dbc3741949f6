"""PEFT's own tests, as its source distribution on the package index ships them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

CACHE = Path(__file__).parents[1] / "build" / "conformance"  # ignored by git


def fetch_tests() -> Path:
    """The unpacked source distribution of the installed PEFT; downloaded once.

    Raises:
        SystemExit: The index cannot be reached or has no source distribution of that version.
    """
    name = f"peft-{version('peft')}"
    folder = CACHE / name
    if not (folder / "tests").is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        # A release is built from one archive: reading it needs neither its dependencies nor a build.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        options = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(CACHE), f"peft=={version('peft')}"]
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
    """A folder with bitsandbytes and torchao, beside the environment; empty if the index does not give them.

    The quantisation tests then have no backend, and pytest says so.
    """
    folder = CACHE / "quantisers"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), "bitsandbytes", "torchao"], capture_output=True)
        folder.mkdir(exist_ok=True)
    return folder
