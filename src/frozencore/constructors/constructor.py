"""A constructor: a class that names the moments it needs and builds the basis of a layer from them.

A constructor of a user is a subclass with ``build``, and ``needs`` if it reads data, added by
:func:`frozencore.register_constructor`. ``start_core`` is optional.

The options of a basis come first. A constructor with more options adds them in a subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

from frozencore.device import torch
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Coordinates, LayerBasis
from frozencore.maths.linalg import SvdMethod, seeded_generator
from frozencore.maths.moments import DIAGONAL_OF, DIAGONALS, LayerMoments, MomentName
from frozencore.maths.whitening import Positive
from frozencore.options import Bounds, check_options

MOST_RANK = 100_000  # no layer is as wide
Rank = Annotated[int, Bounds(ge=1, le=MOST_RANK), "Rank r of the bases; a core has r x r values."]
AUTO_ALPHA = 16.0  # the paper's scale at the paper's rank
Alpha = Annotated[
    Positive | Literal["auto"] | None,
    "Scale of the cores' update, s = alpha / r. auto: 16, with which one learning rate fits many ranks "
    "(docs/quickstart.md); none: s = 1, as in the paper.",
]


@dataclass
class BasisOptions:
    """The options that every constructor has, checked when made.

    A field that a subclass adds becomes a key of a campaign and a flag of the command line, under the same name.
    ``FrozenCoreConfig`` inherits those of frozencore's constructors, and takes others in ``constructor_options``.

    Attributes:
        r: The rank; a layer with fewer inputs or outputs gets ``min(r, m, n)``.
        seed: Seed of random directions and of randomised SVDs.
    """

    r: Rank = 16
    coordinates: Annotated[
        Coordinates,
        "How P and Q are written in their spans. fisher: scaled by the data's second moments, so that a step is "
        "equally long for all constructors (orthonormal without moments); qr: orthonormal, as in the paper; raw and "
        "scaled_raw: for ablations.",
    ] = "fisher"
    svd_method: Annotated[SvdMethod, "How FCCA, RawGrad, SignGrad and LoRA-XS compute truncated SVDs."] = "auto"
    seed: Annotated[int, "Seed of random directions."] = 0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass
class ScaleOptions:
    """The scale of the cores' update; no constructor reads it."""

    alpha: Alpha = "auto"


Options = TypeVar("Options", bound=BasisOptions)


@dataclass(frozen=True)
class LayerData:
    """The data of one layer that a constructor may read.

    Attributes:
        name: The layer's name; with the seed it determines the layer's random directions.
        shape: (m, n): outputs, inputs.
        weight: A function that returns W (m x n, float), dequantised if needed.
        moments: Calibration moments; None for a constructor that needs no data.
    """

    name: str
    shape: tuple[int, int]
    weight: Callable[[], torch.Tensor]
    moments: LayerMoments | None = None

    @property
    def data(self) -> LayerMoments:
        if self.moments is None:
            raise CalibrationError(
                "This constructor needs calibration moments. Call frozencore.calibrate(model, dataloader) first."
            )
        return self.moments

    def seed(self, seed: int) -> int:
        """The seed of the layer, so that random draws do not depend on the order of the layers."""
        return seeded_generator(seed, "layer", self.name).initial_seed()


class Constructor(ABC, Generic[Options]):
    """One way to choose a basis.

    Attributes:
        options: The class of its options.
        weights_only: The basis depends only on the layer's weight, not on data or seed.
        basis_source: The source of the bases, in one word, for the command's help.
        label: Name in reports; by default the key in the table.
    """

    options: type[Options] = BasisOptions  # type: ignore[assignment]  # of a subclass that adds no options
    weights_only: ClassVar[bool] = False
    label: ClassVar[str] = ""
    basis_source: ClassVar[str] = ""

    def needs(self, options: Options) -> frozenset[MomentName]:
        """The moments that the constructor reads; none by default."""
        return frozenset()

    @abstractmethod
    def build(self, layer: LayerData, options: Options) -> LayerBasis:
        """The basis of one layer."""

    def start_core(self, basis: LayerBasis, options: Options, scale: float) -> torch.Tensor | None:
        """The core (r x r) at the start of training, for an adapter of this scale; None for a zero core."""
        return None


class Compressed(Constructor[BasisOptions]):
    """Bases that were made from other adapters (:mod:`frozencore.adapter.compress`), so they can only be read."""

    label = "Compressed"
    basis_source = "adapters"

    def build(self, layer: LayerData, options: BasisOptions) -> LayerBasis:
        raise CalibrationError(
            "A compressed basis is made from other adapters. Name the folder that `frozencore compress` wrote with "
            "basis= (--basis)."
        )


def with_cross(needs: frozenset[MomentName], options: BasisOptions) -> frozenset[MomentName]:
    """Add G, and the diagonals that Fisher coordinates need, to a set of moments."""
    diagonals = DIAGONALS - {vector for vector, matrix in DIAGONAL_OF.items() if matrix in needs}
    return (diagonals if options.coordinates == "fisher" else frozenset[MomentName]()) | needs | {"cross"}
