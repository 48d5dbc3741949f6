"""A file that is there whole or not at all: written aside, flushed, then renamed into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a name to write under, which takes the place of ``path`` when the block ends without an error.

    A process that is killed in the block leaves that file, ``.NAME.PID.tmp``: see :func:`remove_left`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def remove_left(folder: Path, name: str = "*") -> None:
    """Remove what killed writers of that name have left, files and folders; only where no other one can be at work."""
    for left in folder.glob(f".{name}.*.tmp"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
