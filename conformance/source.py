"""PEFT's own tests, as its source distribution on the package index ships them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

CACHE = Path(__file__).parent / ".cache"


def fetch_tests() -> Path:
    """The unpacked source distribution of the installed PEFT; downloaded once.

    Raises:
        SystemExit: The index cannot be reached or has no source distribution of that version.
    """
    name = f"peft-{version('peft')}"
    folder = CACHE / name
    if not (folder / "tests").is_dir():
        # A release is built from one archive: reading it needs neither its dependencies nor a build.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        options = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(CACHE), f"peft=={version('peft')}"]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        archive = CACHE / f"{name}.tar.gz"
        if not archive.is_file():
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise SystemExit(f"The package index did not give {name}.tar.gz ({reason}). Check the network and try again.")
        with tarfile.open(archive) as opened:
            opened.extractall(CACHE, filter="data")
    return folder
