"""Checkpoints that say themselves whether they are whole, and what they belong to.

The Trainer writes a checkpoint file by file; a seal, written last, lists every file's hash and the fingerprint of the
run. A folder without a seal, or with a file that is not as sealed, is half-written and passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from frozencore.errors import TrainingError

SEAL = "complete.json"


def seal_checkpoint(folder: Path, fingerprint: str) -> None:
    """Declare a checkpoint complete: hashes of its files and the fingerprint of its run, written atomically."""
    files = {str(path.relative_to(folder)): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    unsealed = folder / f"{SEAL}.part"
    unsealed.write_text(json.dumps({"fingerprint": fingerprint, "files": files}, indent=1))
    os.replace(unsealed, folder / SEAL)


def newest_complete_checkpoint(out_dir: Path, fingerprint: str) -> Path | None:
    """The complete checkpoint with the most steps, or ``None``.

    Raises:
        TrainingError: It belongs to a run with another recipe, other rows or other parameters.
    """
    for folder in sorted(checkpoints(out_dir), key=_num_steps, reverse=True):
        seal = _read_seal(folder)
        if seal is None:
            continue
        if seal["fingerprint"] != fingerprint:
            raise TrainingError(
                f"To resume, recipe, rows and adapter must be the checkpoint's, but {folder} was made with others. "
                f"Resume with the same options, or train into another folder."
            )
        return folder
    return None


def checkpoints(out_dir: Path) -> list[Path]:
    """Every checkpoint folder, whole or not."""
    return [path for path in out_dir.glob("checkpoint-*") if path.is_dir() and path.name.split("-")[1].isdigit()]


def _read_seal(folder: Path) -> dict[str, str] | None:
    """The seal of a checkpoint whose files are all as sealed."""
    try:
        seal = json.loads((folder / SEAL).read_text())
        whole = all(_sha256(folder / name) == digest for name, digest in seal["files"].items())
        return {"fingerprint": seal["fingerprint"]} if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _num_steps(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
