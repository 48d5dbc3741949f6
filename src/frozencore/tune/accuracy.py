"""An accuracy in words, with its interval."""

from __future__ import annotations

from math import sqrt

from frozencore.text import num_of

NORMAL_95 = 1.96  # deviations of a normal distribution on each side of its middle 95 %


def wilson(share: float, num_rows: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; unlike the standard error it is not zero where all rows are right."""
    square = NORMAL_95**2 / num_rows
    middle = share + square / 2
    half = sqrt(square * share * (1 - share) + square**2 / 4)
    return max(0.0, middle - half) / (1 + square), min(1.0, (middle + half) / (1 + square))


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f}"


def accuracy_in_words(accuracy: float, num_rows: int) -> str:
    """An accuracy with its rows and its interval: ``57.0 % of 100 rows (95 % interval 47.2 to 66.3)``."""
    low, high = map(percent, wilson(accuracy, num_rows))
    return f"{percent(accuracy)} % of {num_of(num_rows, 'row')} (95 % interval {low} to {high})"
