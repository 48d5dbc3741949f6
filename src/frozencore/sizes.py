"""Sizes and times as people write them: a number with its unit, of bytes or of seconds."""

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


def bytes_in_words(num_bytes: float) -> str:
    """So many bytes, rounded: ``1.5 MiB``, ``12.0 GiB``."""
    unit, length = ("GiB", 2**30) if num_bytes >= 2**30 else ("MiB", 2**20) if num_bytes >= 2**20 else ("KiB", 2**10)
    return f"{num_bytes / length:.1f} {unit}"


def at_least(num_bytes: int) -> str:
    """A size as :func:`read_size` reads it that is no smaller: ``97MiB``."""
    unit, length = ("MiB", 2**20) if num_bytes > 10 * 2**20 else ("KiB", 2**10)
    return f"{-(-num_bytes // length)}{unit}"


def time_in_words(seconds: float) -> str:
    """So many seconds, rounded: ``90 s``, ``45 min``, ``3 h 05 min``, ``2 days 4 h``."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"
