"""A word where an adapter comes or leaves that was never calibrated: its bases are zero, so it changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from frozencore.adapter.layer import FrozenCoreLayer

_WAY_OUT = "its bases are zero and it changes nothing. Call frozencore.calibrate(model, dataloader)"


class UncalibratedWarning(UserWarning):
    """An adapter that was never calibrated is saved, loaded or merged."""


def warn_of_uncalibrated(what: str, then: str) -> None:
    """Say that an adapter has no bases.

    Args:
        what: The adapter, as a sentence begins.
        then: What to do after calibration.
    """
    warnings.warn(f"{what} was never calibrated: {_WAY_OUT} {then}.", UncalibratedWarning, stacklevel=4)


def is_uncalibrated(layers: Iterable[FrozenCoreLayer], adapter_name: str) -> bool:
    """Whether the bases of an adapter are zero; all layers get theirs at once, so one tells."""
    first = next(iter(layers), None)
    P = None if first is None else first.factors(adapter_name)[0]
    return P is not None and not P.is_meta and not bool(P.any())
