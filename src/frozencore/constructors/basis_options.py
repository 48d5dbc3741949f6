"""The options of a basis. A constructor with options of its own adds them in a subclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from frozencore.maths.basis import Coordinates
from frozencore.maths.linalg import SvdMethod
from frozencore.maths.whitening import Positive
from frozencore.options import check_options

MOST_RANK = 100_000  # no layer is as wide
Rank = Annotated[int, Field(ge=1, le=MOST_RANK, description="Rank r of the bases; a core holds r x r values.")]
AUTO_ALPHA = 16.0  # the paper's scale at the paper's rank
Alpha = Annotated[
    Positive | Literal["auto"] | None,
    Field(
        description="Scale of the cores' update, s = alpha / r. auto: 16, with which one learning rate fits many ranks "
        "(docs/quickstart.md); none: s = 1, as in the paper."
    ),
]


@dataclass(frozen=True)
class BasisOptions:
    """The options that every constructor has, checked when made.

    A field that a subclass adds becomes a field of ``FrozenCoreConfig``, a key of a campaign and a flag of the command
    line, under the same name.

    Attributes:
        rank: r; a layer with fewer inputs or outputs gets ``min(r, m, n)``.
        seed: Seed of random directions and of randomised SVDs.
    """

    rank: Rank = 16
    coordinates: Annotated[
        Coordinates,
        Field(
            description="How P and Q are written in their spans. fisher: scaled by the data's second moments, so that "
            "a step is equally long for all constructors (orthonormal without moments); qr: orthonormal, as in the "
            "paper; raw and scaled_raw: for ablations."
        ),
    ] = "fisher"
    svd_method: Annotated[SvdMethod, Field(description="How truncated SVDs are computed.")] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ScaleOptions:
    """The scale of the cores' update; no constructor reads it."""

    alpha: Alpha = "auto"
