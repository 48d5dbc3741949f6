"""What a calibration pass may be told, and the defaults (docs/maths.md says why)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from frozencore.calibration.budget import memory_bytes
from frozencore.errors import ConfigError

Tokens = Literal["nonpad", "completion", "nonzero_delta"]
Weighting = Literal["example_mean", "token_sum", "token"]
FisherLabels = Literal["empirical", "mc"]


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of one pass; all of them are part of a moments file's fingerprint.

    Attributes:
        tokens: Which tokens count: every one that is not padding, those that predict a completion token, or those
            with a nonzero output error. An encoder's tokens predict none, so there ``completion`` counts as ``nonpad``.
        skip_first: Tokens at the start of each sequence that do not count (attention sinks).
        weighting: What weighs equally in the loss. ``example_mean``: examples, each with the mean over its completion
            tokens, so that one of ten tokens has the say of one of a hundred. ``token_sum`` (``token`` for short):
            completion tokens, as in training, whose loss is the mean over those of a step.
        fisher_labels: Whose labels the output side of the Fisher (d, D) has: ``empirical``, the data's, or ``mc``,
            drawn from the model. G has the data's in any case, so ``mc`` takes a second backward pass a batch.
        group_size: Layers per pass (the paper's ``calib_group_size``); 999 means all at once.
        memory_budget: What calibration may take beyond a plain forward and backward pass, ``"8GiB"`` for instance or a
            number of bytes. ``calibrate`` then chooses groups, device and algorithm. None is as much as it takes.
        stats_device: Where the sums are held, ``"cpu"`` for instance; None is the layer's own device.
        seed: Of drawn labels.
    """

    tokens: Tokens = "nonpad"
    skip_first: int = 0
    weighting: Weighting = "example_mean"
    fisher_labels: FisherLabels = "empirical"
    group_size: int = 999
    memory_budget: int | str | None = None
    stats_device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("tokens", self.tokens, get_args(Tokens)),
            ("weighting", self.weighting, get_args(Weighting)),
            ("fisher_labels", self.fisher_labels, get_args(FisherLabels)),
        ):
            if value not in allowed:
                raise ConfigError(f"Calibration option {name} must be one of {', '.join(allowed)}, but {value!r} came.")
        if self.weighting == "token":
            object.__setattr__(self, "weighting", "token_sum")
        if self.memory_budget is not None:
            memory_bytes(self.memory_budget)
        if self.skip_first < 0:
            raise ConfigError(f"skip_first counts tokens and cannot be negative, but {self.skip_first} came.")
        if self.group_size < 1:
            raise ConfigError(
                f"group_size (the paper's calib_group_size) must be at least 1 layer, but {self.group_size} came."
            )


def as_hashed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a pass, by name, as they enter the hash of what is made with them.

    ``mc`` has another name there than everywhere else: under its own, G was of drawn labels as well, and such moments
    and runs must not pass for those of today.
    """
    return {**options, "fisher_labels": "mc of d"} if options.get("fisher_labels") == "mc" else dict(options)
