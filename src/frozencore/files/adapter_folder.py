"""The folders of an adapter, a basis and a run: where they are, and errors for missing or damaged files."""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from frozencore.errors import ArtifactError
from frozencore.files.hub import hub_client, is_hub_id
from frozencore.files.lfs_pointer import lfs_pointer_in
from frozencore.files.names import (
    ADAPTER,
    BASIS,
    CARD_FILE,
    CONFIG_FILE,
    FACTORS_FILE,
    HASHES,
    HEADER_FILE,
    PICKLE_FILE,
    RUN_FILE,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
)
from frozencore.text import num_of, one_line

PEFT_TYPE = "FROZENCORE"


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``adapter_config.json``.

    Raises:
        ArtifactError: It is missing, damaged, or not a JSON object.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ArtifactError(missing(directory, CONFIG_FILE))
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise damaged(directory, error) from error


def missing(directory: Path, name: str) -> str:
    """The error message for a missing file."""
    if name == WEIGHTS_FILE and (directory / PICKLE_FILE).exists():
        return (
            f"Weights are read from {WEIGHTS_FILE}, but {directory} holds {PICKLE_FILE}: a pickle can run code and is "
            "never opened. Ask for the adapter as safetensors."
        )
    if not directory.is_dir():
        return f"An adapter is a folder, but {directory} {'is a file' if directory.exists() else 'does not exist'}."
    return (
        f"An adapter folder holds {CONFIG_FILE} and {WEIGHTS_FILE}, but {directory} has no {name}. "
        "Point at the folder that save_pretrained or `frozencore tune` wrote."
    )


def damaged(place: str | Path, error: Exception, what: str = "adapter") -> ArtifactError:
    """The error for a folder that cannot be read, with the reason."""
    if (forbidden := forbidden_in(Path(place))) is not None:
        return forbidden
    if pointer := lfs_pointer_in(Path(place)):
        return ArtifactError(f"The {what} in {place} is not whole: {pointer}")
    reason = one_line(error, 200)
    return ArtifactError(f"The {what} in {place} is damaged ({reason}). Save or download it again.")


def forbidden_in(directory: Path) -> ArtifactError | None:
    """The error for a file without the right to read it. (safetensors reports such a file as missing.)"""
    files = sorted(file for file in directory.iterdir() if file.is_file()) if directory.is_dir() else []
    forbidden = next((file for file in files if not os.access(file, os.R_OK)), None)
    if forbidden is None:
        return None
    return ArtifactError(f"{forbidden} cannot be read: permission denied. Ask for the right to read it (chmod).")


def find_adapter(place: str, *, with_tokenizer: bool = False) -> Path:
    """The folder of an adapter or a basis that a user names: that folder, a run's, or a hub id.

    Raises:
        ArtifactError: As :func:`folder_of` and :func:`adapter_in`.
    """
    return adapter_in(folder_of(place, with_tokenizer=with_tokenizer))


def adapter_in(folder: Path) -> Path:
    """The folder of an adapter or a basis: the folder itself, or ``adapter`` in the folder of a run.

    Raises:
        ArtifactError: There is none in either, or the run has not ended.
    """
    if (place := _adapter_at(folder)) is not None:
        return place
    if has_begun(folder) and (folder / RUN_FILE).is_file():
        raise ArtifactError(
            f"An adapter is saved when its run ends, but {folder} holds an interrupted run. Continue it: "
            f"`frozencore tune --resume --out {shlex.quote(str(folder))}`."
        )
    inside = [child for child in folder.iterdir() if _adapter_at(child)] if folder.is_dir() else []
    inside.sort(key=lambda child: ((child / HEADER_FILE).is_file(), child))  # a basis beside adapters is not meant
    more = f" It holds {num_of(len(inside), 'folder')} of adapters: did you mean {inside[0]}?" if inside else ""
    raise ArtifactError(f"{missing(folder, CONFIG_FILE)}{more}")


def has_begun(folder: Path) -> bool:
    """Whether a run has begun in a folder and not ended: it holds the run's hashes, not a user's file of that name."""
    with suppress(OSError, ValueError):
        hashes = json.loads((folder / HASHES).read_text(encoding="utf-8"))
        return isinstance(hashes, dict) and bool(re.fullmatch("[0-9a-f]{64}", str(hashes.get("model"))))
    return False


def _adapter_at(folder: Path) -> Path | None:
    """The folder of an adapter or a basis, here or in the folder of a run."""
    return next(filter(holds_adapter, (folder, folder / ADAPTER)), None)


def holds_adapter(folder: Path) -> bool:
    """Whether a folder is that of an adapter or of a basis."""
    return any((folder / name).is_file() for name in (CONFIG_FILE, HEADER_FILE))


def require_header(folder: Path) -> None:
    """Check that a folder is the folder of a basis.

    Raises:
        ArtifactError: It is not.
    """
    if not is_folder(folder) or not (folder / HEADER_FILE).is_file():
        inside = folder / BASIS
        way_out = (
            f"Did you mean {inside}?"
            if is_folder(inside)
            else "Point at one that save_basis or `frozencore calibrate` wrote, or at a hub id."
        )
        came = f"{str(folder)[:300]} {f'has no {HEADER_FILE}' if is_folder(folder) else 'is no folder'}"
        raise ArtifactError(f"A basis is a folder with {HEADER_FILE} and {FACTORS_FILE}, but {came}. {way_out}")


def is_folder(place: str | Path) -> bool:
    """Return whether a text names an existing folder; False for a too long name or a zero byte."""
    try:
        return Path(place).is_dir()
    except (OSError, ValueError):
        return False


def folder_of(
    place: str, revision: str | None = None, *, with_tokenizer: bool = False, cache_dir: str | Path | None = None
) -> Path:
    """The folder of an adapter or a basis on this disk: the folder itself, or the offline cache of a hub id.

    Files of a hub id are downloaded if the hub answers; pickled weights only where there are no others.

    Args:
        with_tokenizer: Download the tokenizer and chat template that a trainer saved beside the adapter too.
        cache_dir: The cache of the hub's files; None is the usual one.

    Raises:
        ArtifactError: It is not a folder, and neither the cache nor the hub has it.
    """
    folder = Path(place)
    if not is_hub_id(place) or is_folder(place):
        return folder
    files = [CONFIG_FILE, WEIGHTS_FILE, HEADER_FILE, FACTORS_FILE, CARD_FILE]
    wanted = [*files, *(f"{BASIS}/{name}" for name in (HEADER_FILE, FACTORS_FILE))]
    wanted += TOKENIZER_FILES if with_tokenizer else ()
    fetched: Path = hub_client().download(
        place, revision, wanted, instead=PICKLE_FILE, unless=(WEIGHTS_FILE, HEADER_FILE), cache_dir=cache_dir
    )
    return fetched
