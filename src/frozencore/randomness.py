"""Work that draws random numbers of its own and leaves the caller's random states as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def own_random_state() -> Iterator[None]:
    """Python's, NumPy's and PyTorch's random states, on every device, are afterwards what they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
