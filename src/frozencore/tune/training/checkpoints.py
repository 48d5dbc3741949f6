"""Checkpoints with a file that marks them as whole; signals that ask to stop.

The Trainer writes a checkpoint file by file, and :data:`MARK` comes last. A folder without it is ignored. Whether a
resumed training has the options and inputs that it began with is compared by its run (``frozencore.tune.folder``).
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors import SafetensorError

from frozencore.errors import TrainingError
from frozencore.files.atomic_write import remove, write_text
from frozencore.text import one_line

MARK = "complete.json"
_WRITERS = ("PytorchStreamWriter", "inline_container")  # one of them is in each message of torch.save about a full disk


def mark_whole(folder: Path) -> None:
    """Mark a checkpoint as written to its end."""
    write_text(folder / MARK, "{}")


def is_whole(folder: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    return (folder / MARK).is_file()


def checkpoints(out_dir: Path) -> list[Path]:
    """Every checkpoint folder, complete or not, by its number of steps."""
    folders = (path for path in out_dir.glob("checkpoint-*") if path.is_dir())
    return sorted((path for path in folders if path.name.split("-")[1].isdecimal()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of steps done at a checkpoint."""
    return int(checkpoint.name.split("-")[1])


def newest_whole(out_dir: Path) -> Path | None:
    """The whole checkpoint with the most steps; None if there is none."""
    return next(filter(is_whole, reversed(checkpoints(out_dir))), None)


def starting_point(checkpoint_dir: Path | None, resume: bool) -> Path | None:
    """The newest whole checkpoint to resume from; None for a training that starts at the beginning.

    Newer checkpoints that are not whole are removed with a warning: the Trainer keeps the checkpoints with the most
    steps, and would remove whole ones for them.
    """
    if checkpoint_dir is None or not resume:
        return None
    for folder in reversed(checkpoints(checkpoint_dir)):
        if is_whole(folder):
            return folder
        warnings.warn(
            f"{folder} is not whole, so it is removed: training continues from an earlier step.", stacklevel=2
        )
        remove(folder)
    return None


@contextmanager
def explain_disk_errors(checkpoint_dir: Path | None) -> Iterator[None]:
    """Turn an error in writing a checkpoint into a one-line message with the way out."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = one_line(error, 200)
        is_of_writing = not isinstance(error, RuntimeError) or any(writer in reason for writer in _WRITERS)
        if checkpoint_dir is None or not is_of_writing:
            raise
        raise TrainingError(
            f"A checkpoint could not be written to {checkpoint_dir}: {reason}. "
            "Free some space and resume: the last whole checkpoint is kept."
        ) from error


class Stop:
    """A request to stop a training; calling it returns True after a signal.

    Attributes:
        saved: A description of what is on disk; None if nothing is.
    """

    def __init__(self) -> None:
        self.saved: str | None = None
        self.signals: list[int] = []

    def __call__(self) -> bool:
        return bool(self.signals)


@contextmanager
def defer_stop(confirm: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Delay SIGTERM, SIGHUP and Ctrl-C: inside the context they only set the yielded request, at its end they act.

    Their exception gets notes on what was saved, and on an error that ended the context. A second Ctrl-C takes effect
    at once. Nothing changes in a thread, where handlers cannot be set, and for a signal that is ignored.

    Args:
        confirm: Called from the handler at the first Ctrl-C.
    """
    stop, before, failure = Stop(), dict[int, Any](), None
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
        before = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}

    def hold_back(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in stop.signals:
            stop.signals.clear()
            signal.signal(number, before[number])
            signal.raise_signal(number)
        stop.signals.append(number)
        if number == signal.SIGINT:
            confirm()

    try:
        for number in before:
            signal.signal(number, hold_back)
        yield stop
    except Exception as error:
        failure = error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if stop.signals:
            try:
                signal.raise_signal(stop.signals[0])
            except BaseException as end:
                for note in (failure, stop.saved):
                    if note is not None:
                        end.add_note(str(note))
                raise
