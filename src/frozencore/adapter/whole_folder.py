"""A folder that is there whole or not at all: written aside, then renamed into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frozencore.errors import ArtifactError

_MARKS = ("adapter_config.json", "config.json")


@contextmanager
def whole_folder(out: Path, *, overwrite: bool, reads: Path | None = None) -> Iterator[Path]:
    """Yield a new folder beside ``out`` that takes its place when the block ends without an error.

    Args:
        overwrite: Replace a model or adapter folder that is there; any other folder is never replaced.
        reads: A folder that the block reads from, which must not be replaced.

    Raises:
        ArtifactError: ``out`` is there already, holds something else, holds what is read, or cannot be written.
    """
    _require_free(out, overwrite=overwrite, reads=reads)
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        try:
            yield aside
            if out.is_dir():
                shutil.rmtree(out)
            aside.rename(out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise ArtifactError(f"{out} cannot be written: {error.strerror}. Check folder and free space.") from error


def _require_free(out: Path, *, overwrite: bool, reads: Path | None) -> None:
    if reads is not None and reads.resolve().is_relative_to(out.resolve()):
        raise ArtifactError(f"{out} holds the adapter that is exported: an export goes to a folder of its own.")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise ArtifactError(f"{out} is there already. Choose another folder, or allow it to be overwritten.")
    if not any((out / mark).is_file() for mark in _MARKS):
        raise ArtifactError(f"{out} holds no model and no adapter, so it is not overwritten. Choose another folder.")
