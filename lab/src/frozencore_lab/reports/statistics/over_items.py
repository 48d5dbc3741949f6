"""How far a mean difference could be by chance of what it was measured on: resampled evaluation rows, seeds and tasks.

A gain is an array (seeds, items, others): what the reference scored on an item less what each other method scored on
the same item under the same seed. The statistic is the mean over tasks of the means over seeds and items. All others
share the draws, so that their intervals compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from frozencore_lab.reports.statistics.over_tasks import COVERAGE

NUM_ITEM_RESAMPLES = 5_000
Gains = NDArray[np.float64]
"""(seeds, items, others)"""


def item_means(
    gains: Sequence[Gains], *, num_resamples: int = NUM_ITEM_RESAMPLES, seed: int = 0
) -> NDArray[np.float64]:
    """Resampled statistics (resamples, others): other items of the same tasks, scored by the same runs.

    Items are drawn with replacement within each task; tasks and seeds stay as they are.
    """
    generator = np.random.default_rng(seed)
    total = np.zeros((num_resamples, gains[0].shape[2]))
    for gain in gains:
        by_item = gain.mean(axis=0)
        total += _draws(generator, num_resamples, len(by_item)) @ by_item
    return total / len(gains)


def hierarchical_means(
    gains: Sequence[Gains], *, num_resamples: int = NUM_ITEM_RESAMPLES, seed: int = 0
) -> NDArray[np.float64]:
    """Resampled statistics (resamples, others): other tasks, other seeds and other items.

    Tasks are drawn with replacement; for each one drawn, its seeds and its items are, apart from one another: every
    seed scores the same items.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(gains), size=(num_resamples, len(gains)))
    total = np.zeros((num_resamples, gains[0].shape[2]))
    for task, gain in enumerate(gains):
        resample, _ = np.nonzero(drawn == task)  # once for each time that the task was drawn
        seeds = _draws(generator, len(resample), gain.shape[0])
        items = _draws(generator, len(resample), gain.shape[1])
        means = sum(seeds[:, s, None] * (items @ gain[s]) for s in range(gain.shape[0]))
        np.add.at(total, resample, means)
    return total / len(gains)


def percentiles(means: NDArray[np.float64]) -> list[tuple[float, float]]:
    """The percentile interval (95 %) of each column of resampled statistics."""
    low, high = np.quantile(means, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _draws(generator: np.random.Generator, num_resamples: int, size: int) -> NDArray[np.float64]:
    """(resamples, size): the share that each of ``size`` things has in a draw of as many with replacement."""
    drawn = generator.integers(size, size=(num_resamples, size))
    drawn += size * np.arange(num_resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=num_resamples * size).reshape(num_resamples, size) / size
