"""The options of a calibration pass (docs/method.md gives the reasons for the defaults)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from frozencore.options import Bounds, check_options

Tokens = Literal["nonpad", "completion", "nonzero_delta"]
Weighting = Literal["example_mean", "token_sum"]

BATCH_SIZE = 8
"""Rows in a batch of the calibration, where the rows do not come as batches."""


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of one pass; the options that change the sums are part of a moments file's fingerprint."""

    tokens: Annotated[
        Tokens,
        "Tokens that are summed. nonpad: all except padding; completion: those that predict a completion token; "
        "nonzero_delta: those with a nonzero output error, as always with a loss_fn and in models other than "
        "decoder-only language models.",
    ] = "nonpad"
    skip_first: Annotated[
        int, Bounds(ge=0), "Tokens at the start of each sequence that are not summed (attention sinks)."
    ] = 0
    weighting: Annotated[
        Weighting,
        "Weights in the loss. example_mean: every example has the same weight, whatever its number of completion "
        "tokens. token_sum: every completion token has the same weight, as in training. docs/method.md compares both.",
    ] = "example_mean"
    group_size: Annotated[
        int, Bounds(ge=1), "Layers per pass (the paper's calib_group_size); 999 means all at once."
    ] = 999
    stats_device: Annotated[str | None, "Device of the sums, such as cpu. Default: the device of each layer."] = None

    def __post_init__(self) -> None:
        check_options(self)


def options_of_sums(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that change the sums of a pass; the others choose where sums are stored, and how many at a time."""
    return {name: options[name] for name in options if name not in ("group_size", "stats_device")}
