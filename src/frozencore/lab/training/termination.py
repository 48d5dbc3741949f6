"""SIGTERM, with which schedulers end a job: held back until a training has written what it goes on from."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_held_back() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM only makes the function that is given true; afterwards it does what it would have done.

    In a thread, where handlers cannot be set, and where SIGTERM is ignored, nothing is changed.
    """
    before = signal.getsignal(signal.SIGTERM)
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield lambda: False
        return
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            signal.raise_signal(signal.SIGTERM)
