"""What is found in a file of moments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from frozencore.calibration.store import load_moments
from frozencore.cli.findings import Finding
from frozencore.errors import FrozenCoreError
from frozencore.tune.run.files import MOMENTS_FILE
from frozencore.words import one_line


def moments(path: Path) -> Iterator[Finding]:
    """A moments file, or the folder that ``frozencore calibrate`` wrote."""
    file = path / MOMENTS_FILE if path.is_dir() else path
    try:
        moments = load_moments(file)
    except FrozenCoreError as error:
        yield Finding(file.name, one_line(error), sound=False)
    else:
        counts = [layer.num_tokens for layer in moments.values()]
        names = sorted({name for layer in moments.values() for name in layer.names()})
        counted = bool(counts) and min(counts) > 0
        said = f"{len(moments)} layers, {', '.join(names)}; {min(counts, default=0):,} tokens"
        yield Finding(file.name, said if counted else f"{said}: nothing was counted. Calibrate again.", counted)
    if path.is_dir():
        from frozencore.cli.adapter_findings import beside

        yield from beside(path)
