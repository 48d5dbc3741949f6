"""Own rows from several sources: all rows, or drawn in a proportion such as ``a.jsonl=2`` with ``b.jsonl``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from frozencore.errors import ConfigError
from frozencore.tune.rows import TextRow
from frozencore.tune.rows.own_rows import OwnRows, read_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row_sources import named

Data = str | tuple[str, ...]
"""One source, or several, each with or without ``=WEIGHT``."""
_WEIGHTED = re.compile(r"(?P<source>.+)=(?P<weight>\d+\.?\d*|\.\d+)")


@dataclass(frozen=True)
class WeightedSource:
    """The name of a source, and its weight; None if no source has a weight."""

    name: str
    weight: float | None = None


def in_words(data: Data | None) -> str:
    """The sources as given."""
    return data if isinstance(data, str) else " and ".join(data or ())


def sources_of(data: Data) -> list[WeightedSource]:
    """The sources that ``--data`` names.

    Raises:
        ConfigError: A source comes twice, or a weight is 0 or given to a single source.
    """
    given = [data] if isinstance(data, str) else list(data)
    found = []
    for text in given:
        match = None if Path(text).is_file() else _WEIGHTED.fullmatch(text)
        found.append(WeightedSource(text) if match is None else WeightedSource(match["source"], float(match["weight"])))
    names = [source.name for source in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"Each --data is another source, but {', '.join(sorted(twice))} comes twice. Use a weight.")
    if all(source.weight is None for source in found):
        return found
    if len(found) == 1 or any(source.weight == 0 for source in found):
        raise ConfigError(
            f"A weight is a number above 0 of one source beside others (--data a.jsonl=2 --data b.jsonl), but "
            f"{' and '.join(given)} came."
        )
    return [WeightedSource(source.name, 1.0 if source.weight is None else source.weight) for source in found]


def read_sources(
    data: Data, encoder: PromptEncoder, columns: str | None = None, *, skip_bad: bool = False
) -> list[tuple[WeightedSource, OwnRows]]:
    """Read every source as :func:`read_rows` does; with several sources a row's id begins with the source's number.

    Raises:
        ConfigError, DataError: As in :func:`sources_of` and :func:`read_rows`.
    """
    sources = sources_of(data)
    prefixes = [f"{number}:{named(source.name)}:" for number, source in enumerate(sources, start=1)]
    return [
        (source, read_rows(source.name, encoder, columns, skip_bad=skip_bad, prefix=prefix if len(sources) > 1 else ""))
        for source, prefix in zip(sources, prefixes, strict=True)
    ]


def draw(parts: Sequence[Sequence[TextRow]], weights: Sequence[float | None]) -> list[list[TextRow]]:
    """Draw as many rows of each part as the proportion of the weights allows; all rows without weights.

    No row is drawn twice. Rows are drawn by a hash of their id, so that every run draws the same rows.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return [list(part) for part in parts]
    per_weight = min(len(part) / weight for part, weight in zip(parts, given, strict=True))
    drawn = []
    for part, weight in zip(parts, given, strict=True):
        count = max(1, int(per_weight * weight + 1e-9))
        chosen = sorted(range(len(part)), key=lambda i: hashlib.sha256(f"drawn:{part[i].id}".encode()).digest())
        drawn.append([part[i] for i in sorted(chosen[:count])])
    return drawn
