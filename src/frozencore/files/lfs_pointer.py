"""Pointers of Git LFS: a clone without its large files has a few lines of text in their places."""

from __future__ import annotations

from pathlib import Path

START = b"version https://git-lfs"
SUFFIXES = (".safetensors", ".bin", ".gguf", ".json")


def lfs_pointer_in(place: Path) -> str | None:
    """A sentence on the first file of a folder, or on a file itself, that is a pointer; None if there is none."""
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        if path.suffix in SUFFIXES and path.is_file():
            with path.open("rb") as file:
                if file.read(len(START)) == START:
                    return f"{path} is a pointer of Git LFS. Run `git lfs pull` in its folder, or download it again."
    return None
