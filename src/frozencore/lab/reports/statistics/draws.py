"""Draws with replacement, as counts: how often each thing is in each resample."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def draw_counts(generator: np.random.Generator, num_resamples: int, size: int) -> NDArray[np.int64]:
    """(resamples, size): how often each of ``size`` things is in a draw of as many with replacement."""
    drawn = generator.integers(size, size=(num_resamples, size))
    drawn += size * np.arange(num_resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=num_resamples * size).reshape(num_resamples, size)
