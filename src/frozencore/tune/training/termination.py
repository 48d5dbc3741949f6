"""SIGTERM, with which schedulers end a job, and Ctrl-C: held back until a training has written what it goes on from."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop:
    """Whether a training was told to stop: true once it was.

    Attributes:
        saved: What of the training is on disk by then, in words; None if nothing is.
    """

    def __init__(self) -> None:
        self.saved: str | None = None
        self.signals: list[int] = []

    def __call__(self) -> bool:
        return bool(self.signals)


@contextmanager
def stop_held_back(told: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Inside, SIGTERM and Ctrl-C only make what is given true; afterwards they do what they would have done.

    An exception that they raise has what was saved as its note. A second Ctrl-C takes effect at once. In a thread,
    where handlers cannot be set, nothing is changed, nor is a signal that is ignored.

    Args:
        told: Called from the handler, at the first Ctrl-C.
    """
    stop, before = Stop(), _handlers()

    def hold_back(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in stop.signals:
            stop.signals.clear()
            signal.signal(number, before[number])
            signal.raise_signal(number)
        stop.signals.append(number)
        if number == signal.SIGINT:
            told()

    try:
        for number in before:
            signal.signal(number, hold_back)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if stop.signals:
            _raise(stop)


def _handlers() -> dict[int, Any]:
    """Of the signals that can be held back here."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    return {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}


def _raise(stop: Stop) -> None:
    try:
        signal.raise_signal(stop.signals[0])
    except BaseException as end:
        if stop.saved is not None:
            end.add_note(stop.saved)
        raise
