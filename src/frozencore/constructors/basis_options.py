"""The options of a basis. A constructor with options of its own adds them in a subclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from frozencore.errors import ConfigError
from frozencore.maths.basis import Coordinates
from frozencore.maths.linalg import SvdMethod
from frozencore.maths.whitening import Positive
from frozencore.options import check_options
from frozencore.words import read_size

MOST_RANK = 100_000  # no layer is as wide
Rank = Annotated[int, Field(ge=1, le=MOST_RANK, description="Rank r of the bases; a core holds r x r values.")]
VALUE_BYTES = 4  # a core is float32


def trained_values(budget: object) -> int:
    """Read a rank budget: a number of trained values, or their size in bytes as float32.

    Raises:
        ConfigError: ``budget`` is neither, or not positive.
    """
    found = read_size(budget)
    number = found[0] // (VALUE_BYTES if found[1] else 1) if found else 0
    if number < 1:
        raise ConfigError(
            "A rank budget is a number of trained values such as 36864, or the size of so many as float32 such as "
            f'"150KB", but {budget!r} came.'
        )
    return number


RankBudget = Annotated[
    Annotated[int | str, BeforeValidator(trained_values)] | None,
    Field(
        description="Trained values of all cores together, 36864 for instance, or their size as float32 (150KB), "
        "instead of one rank: calibration spends them on the layers where they are worth most (docs/rank-budget.md). "
        "Also for a method that can train any number of values."
    ),
]
AUTO_ALPHA = 16.0  # the paper's scale at the paper's rank
Alpha = Annotated[
    Positive | Literal["auto"] | None,
    Field(
        description="Scale s = alpha / r of what the cores add; auto is 16, by which one learning rate serves all "
        "ranks (docs/rank-budget.md); none is s = 1, the paper's."
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
            description="How P and Q are written in their spans: fisher, by second moments of the data, by which a "
            "step is as long for all constructors (orthonormal where none are read); qr, orthonormal, the paper's; "
            "polar; raw and scaled_raw, ablations."
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
