"""What a run leaves behind so that it can be trusted later: versions, commit, machine; written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import frozencore
from frozencore.errors import ArtifactError
from frozencore.whole_file import whole_file

PACKAGES = ("frozencore", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "numpy")


def provenance() -> dict[str, Any]:
    """Versions, source commit and machine of this process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "commit": source_commit(),
        "platform": platform.platform(),
        "device": device,
        "num_threads": torch.get_num_threads(),
    }


def source_commit() -> str | None:
    """The git commit of the source tree that runs, marked ``-dirty`` with uncommitted changes; None outside of git."""
    folder = Path(frozencore.__file__).parent
    try:
        inside = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if inside and changes else commit


def require_writable(folder: Path) -> None:
    """Refuse an output folder that cannot be made or written to, before any work is done for it.

    Raises:
        ArtifactError: It, or the nearest folder above it that exists, is no folder or is read-only.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ArtifactError(f"--output {folder} cannot be written: {nearest} is not a writable folder. Choose another.")


def write_json(path: Path, value: Any) -> None:
    """Write JSON aside, flush it, and rename it into place; NaN and infinity become null."""
    write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, as :func:`write_json` does."""
    write_text(path, "".join(json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Write a text file aside, flush it, and rename it into place."""
    try:
        with whole_file(path) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror}. Check folder and free space.") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
