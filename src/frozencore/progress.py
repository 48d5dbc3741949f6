"""The progress of long steps: the type of what reports it, and functions that change reports."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """A function of a stage's name, the steps done, their total if known, and a short note (``"loss 0.412"``)."""

    def __call__(self, stage: str, done: int, total: int | None, note: str = "", /) -> None: ...


def no_progress(stage: str, done: int, total: int | None, note: str = "", /) -> None:
    """Report to nobody."""


def as_stage(progress: Progress, name: str) -> Progress:
    """Wrap a progress so that all reports appear as one stage of this name."""
    return lambda _, done, total, note="": progress(name, done, total, note)


def with_note(progress: Progress, note: str) -> Progress:
    """Wrap a progress so that reports without a note get this note."""
    return lambda stage, done, total, own="": progress(stage, done, total, own or note)


def share_of(progress: Progress, index: int, num_passes: int) -> Progress:
    """The progress report of one pass, scaled to its share of all passes."""
    if num_passes == 1:
        return progress

    def report(stage: str, done: int, total: int | None, _: str = "") -> None:
        progress(stage, done + index * (total or 0), total * num_passes if total is not None else None)

    return report
