"""Sizes as people write them: a number, with a unit of bytes or without."""

from __future__ import annotations

import re

UNITS = {"b": 1} | {
    f"{prefix}{infix}b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


def read_size(size: object) -> tuple[int, bool] | None:
    """A positive whole number, and whether it counts bytes (1 GB = 1000³, 1 GiB = 1024³); None for what is no size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if found is None or isinstance(size, bool) or (found[2] and found[2].lower() not in UNITS):
        return None
    number = int(float(found[1]) * UNITS.get(found[2].lower(), 1))
    return (number, bool(found[2])) if number >= 1 else None
