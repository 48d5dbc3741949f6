"""How a long step tells where it is: one signature, from the calibration pass to the board of a campaign."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Called with a stage's name, the steps done, their total if it is known, and a short note (``"loss 0.412"``)."""

    def __call__(self, stage: str, done: int, total: int | None, note: str = "", /) -> None: ...


def as_stage(progress: Progress, name: str) -> Progress:
    """Whatever is told becomes a stage of that name."""
    return lambda _, done, total, note="": progress(name, done, total, note)
