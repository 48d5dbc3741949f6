"""The options of a calibration pass, and how many backward passes they make (docs/maths.md says why the defaults).

``G = E[δxᵀ]`` is the gradient of the loss with the data's labels. With labels drawn from the model its expectation is
zero, so it would be noise. ``d = E[δ⊙δ]`` and ``D = E[δδᵀ]`` are the output side of the Fisher metric. The data's
labels give the empirical Fisher (the paper); labels drawn from the model (``mc``) estimate the true Fisher. x, a and A
do not depend on labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from frozencore.calibration.budget import memory_bytes
from frozencore.errors import ConfigError
from frozencore.maths.moments import BACKWARD_MOMENTS, MomentName
from frozencore.options import check_options

Tokens = Literal["nonpad", "completion", "nonzero_delta"]
Weighting = Literal["example_mean", "token_sum", "token"]
FisherLabels = Literal["empirical", "mc"]

WHERE_AND_HOW = ("group_size", "memory_budget", "stats_device")
"""Options that change where sums are held and how many at a time; the sums stay the same."""
FISHER_MOMENTS: frozenset[MomentName] = frozenset({"error_square", "error_outer"})


def _size(size: Any) -> Any:
    memory_bytes(size)
    return size


def _device(name: str) -> str:
    import torch

    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"stats_device must be a device such as cpu or cuda:1, but {name!r} came.") from error
    return name


def _full_name(weighting: Weighting) -> Weighting:
    return "token_sum" if weighting == "token" else weighting


MemoryBudget = Annotated[
    Annotated[int | str, BeforeValidator(_size)] | None,
    Field(
        description="Memory of calibration beyond a plain forward and backward pass, such as 8GB, or a number of "
        "bytes. Calibration then chooses groups of layers and the sums' device (docs/memory.md). Default: no limit."
    ),
]


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of one pass; the options that change the sums are part of a moments file's fingerprint.

    Attributes:
        seed: The seed of drawn labels.
    """

    tokens: Annotated[
        Tokens,
        Field(
            description="Tokens that are summed. nonpad: all except padding; completion: those that predict a "
            "completion token (in an encoder: all except padding); nonzero_delta: those with a nonzero output error."
        ),
    ] = "nonpad"
    skip_first: Annotated[
        int, Field(ge=0, description="Tokens at the start of each sequence that are not summed (attention sinks).")
    ] = 0
    weighting: Annotated[
        Weighting,
        AfterValidator(_full_name),
        Field(
            description="Weights in the loss. example_mean: every example has the same weight, whatever its number of "
            "completion tokens. token_sum (or token): every completion token has the same weight, as in training. "
            "docs/maths.md compares both."
        ),
    ] = "example_mean"
    fisher_labels: Annotated[
        FisherLabels,
        Field(
            description="Labels for the output side of the Fisher (d, D). empirical: the data's; mc: drawn from the "
            "model. G always uses the data's, so mc takes a second backward pass for each batch."
        ),
    ] = "empirical"
    group_size: Annotated[
        int, Field(ge=1, description="Layers per pass (the paper's calib_group_size); 999 means all at once.")
    ] = 999
    memory_budget: MemoryBudget = None
    stats_device: Annotated[
        Annotated[str, AfterValidator(_device)] | None,
        Field(description="Device of the sums, such as cpu. Default: each layer's own device."),
    ] = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "weighting", _full_name(self.weighting))


def options_of_sums(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that change the sums of a pass, by name."""
    return {name: value for name, value in options.items() if name not in WHERE_AND_HOW}


@dataclass(frozen=True)
class Backward:
    """One backward pass over a batch.

    Attributes:
        labels: The labels of its loss.
        needs: The moments that are summed in this pass.
        counts: Count tokens, and sum inputs and outputs; exactly one backward pass of each batch does this.
    """

    labels: FisherLabels
    needs: frozenset[MomentName]
    counts: bool = True


def backward_passes(needs: frozenset[MomentName], options: CalibrationOptions) -> tuple[Backward, ...]:
    """The backward passes after the forward pass of each batch, in order: none, one, or two.

    The pass with drawn labels comes first and keeps the graph. The second pass, with the large sums, frees it.
    """
    only_nonzero = options.tokens == "nonzero_delta"
    if needs.isdisjoint(BACKWARD_MOMENTS) and not only_nonzero:
        return ()
    drawn = needs & FISHER_MOMENTS if options.fisher_labels == "mc" else frozenset[MomentName]()
    if not drawn:
        return (Backward("empirical", needs),)
    if "cross" not in needs and not only_nonzero:
        return (Backward("mc", needs),)
    return Backward("mc", drawn, counts=False), Backward("empirical", needs - drawn)
