"""A constructor: a class that says which moments it needs and builds the basis of a layer from them.

A constructor of your own is a subclass with ``needs`` and ``build``; :func:`frozencore.register_constructor` enters it.
The other methods say what else it can do: build from a sketch, spend a rank budget, start from a core.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from frozencore.constructors.basis_options import BasisOptions
from frozencore.errors import CalibrationError
from frozencore.maths.agreement import agreed_gains
from frozencore.maths.basis import Basis
from frozencore.maths.groups import SharedSpans
from frozencore.maths.linalg import TruncatedSVD, seeded_generator
from frozencore.maths.moments import DIAGONAL_OF, DIAGONALS, LayerMoments, MomentName
from frozencore.maths.whitening import Whitening
from frozencore.torch_later import torch

Colour = Literal["orange", "blue", "navy", "grey", "black"]
Options = TypeVar("Options", bound=BasisOptions)


@dataclass(frozen=True)
class LayerEvidence:
    """The evidence of one layer that a constructor may look at.

    Attributes:
        name: The layer's name; together with the seed it fixes the layer's random directions.
        shape: (m, n): outputs, inputs.
        weight: Returns W (m x n, float) when called, dequantised if needed.
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
                f"This constructor needs calibration moments, but layer {self.name!r} has none. "
                "Call frozencore.calibrate(model, dataloader) first."
            )
        return self.moments

    def seed(self, seed: int) -> int:
        """A seed for this layer alone, so that random draws do not depend on the order of the layers."""
        return seeded_generator(seed, "layer", self.name).initial_seed()


class Constructor(ABC, Generic[Options]):
    """One way to choose a basis.

    Attributes:
        options: The class of its options.
        weights_only: The basis depends on the layer's weight alone: it is the same for all data and seeds.
        has_gains: A rank budget can be spent by what each direction gains; other constructors get equal ranks.
        variants: Options that are worth a try beside the defaults.
        label, colour: Its name and colour in reports; by default its key in the table, in grey.
    """

    options: type[Options] = BasisOptions  # type: ignore[assignment]  # of a subclass with no options of its own
    weights_only: ClassVar[bool] = False
    has_gains: ClassVar[bool] = False
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    label: ClassVar[str] = ""
    colour: ClassVar[Colour] = "grey"

    @abstractmethod
    def needs(self, options: Options) -> frozenset[MomentName]:
        """The moments that it reads."""

    @abstractmethod
    def build(self, layer: LayerEvidence, options: Options) -> Basis:
        """The basis of one layer."""

    def metric(self, options: Options) -> Whitening | None:
        """The diagonal metric in which the leading singular triples of the whitened cross moment are all it reads.

        Its basis can then be built from a sketch and for groups of rows. None if it reads more.
        """
        return None

    def build_streamed(self, layer: LayerEvidence, svd: TruncatedSVD, options: Options) -> Basis:
        """The basis from singular triples in that metric, and from moments without matrices."""
        raise NotImplementedError(f"{type(self).__name__} has no metric, so it cannot build from a sketch.")

    def build_grouped(self, layer: LayerEvidence, spans: SharedSpans, options: Options) -> Basis:
        """The basis from spans shared by groups of rows in that metric, and from pooled moments without matrices."""
        raise NotImplementedError(f"{type(self).__name__} has no metric, so it cannot build for groups.")

    def matrix(self, moments: LayerMoments, options: Options) -> torch.Tensor:
        """The matrix (m x n) whose leading singular directions it takes, of a constructor that ``has_gains``."""
        raise NotImplementedError(f"{type(self).__name__} takes the singular directions of no matrix.")

    def gains(
        self, halves: tuple[LayerMoments, LayerMoments], layer: LayerEvidence, count: int, options: Options
    ) -> torch.Tensor:
        """The gain of each of the ``count`` leading directions, on which two halves of the examples agree."""
        T1, T2 = (self.matrix(half, options) for half in halves)
        return agreed_gains(T1, T2, count, svd_method=options.svd_method, seed=layer.seed(options.seed))

    def start_core(self, basis: Basis, options: Options, scale: float) -> torch.Tensor | None:
        """The core (r x r) that training starts from in an adapter of that scale; None for a zero core."""
        return None


def with_cross(needs: frozenset[MomentName], options: BasisOptions) -> frozenset[MomentName]:
    """These moments, G, and the diagonals by which Fisher coordinates are measured."""
    diagonals = DIAGONALS - {vector for vector, matrix in DIAGONAL_OF.items() if matrix in needs}
    return (diagonals if options.coordinates == "fisher" else frozenset[MomentName]()) | needs | {"cross"}
