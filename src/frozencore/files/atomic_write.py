"""Write files and folders atomically: under a temporary name, flushed, then renamed."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

from safetensors import SafetensorError

from frozencore.errors import ArtifactError
from frozencore.files.names import CONFIG_FILE, HEADER_FILE, MODEL_CONFIG
from frozencore.text import one_line

_MARKS = (CONFIG_FILE, MODEL_CONFIG, HEADER_FILE, "genai_config.json")
_RANDOM = 8 * "[0-9a-f]"  # as a pattern: the part of a temporary name that :func:`_temporary` draws


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary name, which is renamed to ``path`` if the block ends without an error.

    A process killed in the block leaves the file ``.NAME.RANDOM.tmp``; see :func:`remove_left`.

    Raises:
        ArtifactError: The file cannot be written.
    """
    aside = _temporary(path)
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            with aside.open("rb") as written:
                os.fsync(written.fileno())
            allow_as_umask(aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def remove_left(folder: Path, name: str = "*") -> None:
    """Remove the temporary files of killed writers; call it only if no other writer is running.

    A folder that was set aside for a new one is put back if the new one is not there.
    """
    for aside in folder.glob(f".{name}.{_RANDOM}.old"):
        place = folder / aside.name[1:].rsplit(".", 2)[0]
        if not place.exists():
            aside.rename(place)
    for left in (*folder.glob(f".{name}.{_RANDOM}.tmp"), *folder.glob(f".{name}.{_RANDOM}.old")):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextmanager
def atomic_folder(out: Path, *, overwrite: bool | None, reads: Iterable[str | Path | None] = ()) -> Iterator[Path]:
    """Yield a new folder beside ``out`` that is renamed to ``out`` if the block ends without an error.

    Args:
        out: The folder; of a link to one, the folder that it leads to.
        overwrite: Replace an existing model, adapter or basis folder; other folders are never replaced. None if the
            user has no such option.
        reads: Folders that the block reads and that must not be replaced; a hub id, or None, is none.

    Raises:
        ArtifactError: ``out`` exists, has other files, is the folder that is read, or cannot be written.
    """
    reads = tuple(reads)
    check_output(out, overwrite=overwrite, reads=reads)
    if out.is_symlink() and out.is_dir():
        out = out.resolve()
    aside = _temporary(out)
    with _explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        try:
            yield aside
            for file in aside.iterdir():
                if file.is_file():
                    allow_as_umask(file)
            check_output(out, overwrite=overwrite, reads=reads)  # another process may have written it meanwhile
            _put_in_place(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the file or folder that the user gave in an error of the system; the system names the temporary one."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:  # one of transformers', which is not about writing
            raise
        reason = one_line(error, 200) if isinstance(error, SafetensorError) else error.strerror
        raise ArtifactError(f"{path} cannot be written: {reason}. Check folder and free space.") from error


def _temporary(path: Path) -> Path:
    """A name beside a path, random because a killed process with the same id may have left one."""
    path = path if path.name not in ("", "..") else path.resolve()
    return path.with_name(f".{path.name}.{token_hex(4)}.tmp")


def _put_in_place(new: Path, out: Path) -> None:
    """Rename a folder; a folder that it replaces is removed only after that, or gets its place back."""
    if not out.is_dir():
        new.rename(out)
        return
    if out.samefile("."):  # a process whose folder is renamed or removed would find no file by its relative path
        for old in out.iterdir():
            remove(old)
        for part in new.iterdir():
            part.rename(out / part.name)
        return
    old = new.with_suffix(".old")
    try:
        out.rename(old)
        new.rename(out)
    finally:  # also if Ctrl-C comes before, between or after the two
        if not out.exists():
            old.rename(out)
        elif old.exists():
            shutil.rmtree(old)


def check_output(out: Path, *, overwrite: bool | None, reads: Iterable[str | Path | None] = ()) -> None:
    """Check that a folder can be written; for the arguments and errors see :func:`atomic_folder`."""
    require_writable(out.parent)
    for place in reads:
        if place is not None and Path(place).exists() and Path(place).resolve().is_relative_to(out.resolve()):
            raise ArtifactError(f"{out} is read here, or {place} in it is: write the result to another folder.")
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    is_replaceable = any((out / mark).is_file() for mark in _MARKS)
    if not (overwrite and is_replaceable):
        reason = "holds no model, adapter or basis, so it is not overwritten" if overwrite else "is there already"
        or_allow = ", or allow it to be overwritten (--overwrite; overwrite=True)" if overwrite is False else ""
        raise ArtifactError(f"{out} {reason}. Choose another folder{or_allow}.")


def allow_as_umask(file: Path) -> None:
    """Give a file the permissions of the user's umask; safetensors makes files readable for the owner only."""
    umask = os.umask(0o077)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def require_writable(folder: Path) -> None:
    """Check before any work that an output folder can be made and written.

    Raises:
        ArtifactError: It, or the nearest existing folder above it, is not a folder or is read-only.
    """
    above = (folder.absolute(), *folder.absolute().parents)
    nearest = next(path for path in above if os.path.lexists(path))  # a link to nothing is no folder
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ArtifactError(f"--out {folder} cannot be written: {nearest} is not a writable folder. Choose another.")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN and infinity become null."""
    write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, atomically."""
    write_text(path, "".join(json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in rows))


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file. ``str.splitlines`` would also split at U+2028, U+0085 and others inside a row."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, Path) else value
