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
OF_THE_FISHER: frozenset[MomentName] = frozenset({"error_square", "error_outer"})


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
        description="What calibration may take beyond a plain forward and backward pass, 8GiB for instance or a number "
        "of bytes: it then chooses groups, device and algorithm (docs/memory.md). Default: as much as it takes."
    ),
]


RefreshMemory = Annotated[
    Annotated[int | str, BeforeValidator(_size)] | None,
    Field(
        description="What the moments of refresh may take, 512MB for instance or a number of bytes: exact sums "
        "where they fit, else sketches. Default: 128MB, or what the narrowest sketches take."
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
            description="Tokens that count: all that are not padding, those that predict a completion token, or those "
            "with a nonzero output error. An encoder's tokens predict none: there completion counts as nonpad."
        ),
    ] = "nonpad"
    skip_first: Annotated[
        int, Field(ge=0, description="Tokens at the start of each sequence that do not count (attention sinks).")
    ] = 0
    weighting: Annotated[
        Weighting,
        AfterValidator(_full_name),
        Field(
            description="What weighs equally in the loss. example_mean: examples, each with the mean over its "
            "completion tokens, so that one of ten tokens has the say of one of a hundred. token_sum (token for "
            "short): completion tokens, as in training, whose loss is the mean over those of a step. docs/maths.md has "
            "both measured."
        ),
    ] = "example_mean"
    fisher_labels: Annotated[
        FisherLabels,
        Field(
            description="Whose labels the output side of the Fisher (d, D) has: the data's (empirical), or labels "
            "drawn from the model (mc). G has the data's in any case, so mc takes a second backward pass a batch."
        ),
    ] = "empirical"
    group_size: Annotated[
        int, Field(ge=1, description="Layers per pass (the paper's calib_group_size); 999 means all at once.")
    ] = 999
    memory_budget: MemoryBudget = None
    stats_device: Annotated[
        Annotated[str, AfterValidator(_device)] | None,
        Field(description="Where the sums are held, cpu for instance. Default: each layer's own device."),
    ] = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "weighting", _full_name(self.weighting))


def of_the_sums(options: Mapping[str, Any]) -> dict[str, Any]:
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
    drawn = needs & OF_THE_FISHER if options.fisher_labels == "mc" else frozenset[MomentName]()
    if not drawn:
        return (Backward("empirical", needs),)
    if "cross" not in needs and not only_nonzero:
        return (Backward("mc", needs),)
    return Backward("mc", drawn, counts=False), Backward("empirical", needs - drawn)
