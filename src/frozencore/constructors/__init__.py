"""The table of basis constructors. Adding one is one file here and one row below.

A constructor file holds a pure function on tensors; the row says what it reads and how the options reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from frozencore.constructors.eva import EVA_OUTPUTS, EvaOutput, eva_basis, eva_needs
from frozencore.constructors.fcca import fcca_basis, fcca_basis_of_svd
from frozencore.constructors.filora import filora_basis, filora_needs
from frozencore.constructors.lora_xs import lora_xs_basis
from frozencore.constructors.milora import milora_basis
from frozencore.constructors.random import random_basis
from frozencore.constructors.rawgrad import rawgrad_basis
from frozencore.constructors.signgrad import signgrad_basis
from frozencore.constructors.vera import vera_basis
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.basis import COORDINATES, Basis, Coordinates
from frozencore.maths.linalg import SVD_METHODS, SvdMethod, TruncatedSVD, seeded_generator
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.maths.whitening import FISHERS, Fisher, Whitening
from frozencore.naming import unknown_name

__all__ = [
    "CONSTRUCTORS", "BasisOptions", "Colour", "Constructor", "LayerEvidence", "build_basis", "eva_basis", "fcca_basis",
    "filora_basis", "find_constructor", "lora_xs_basis", "milora_basis", "random_basis", "rawgrad_basis",
    "signgrad_basis", "vera_basis",
]  # fmt: skip

Colour = Literal["orange", "blue", "navy", "grey", "black"]
WEIGHT_SEED = 0  # directions of the weight alone are the same under every seed


@dataclass(frozen=True)
class BasisOptions:
    """Everything that decides a basis beside the evidence; checked when made.

    Attributes:
        rank: r; a layer with fewer inputs or outputs gets ``min(r, m, n)``.
        whitening: Metric of ``fcca``.
        filora_fisher: Dense eigenvectors (the original method) or coordinate selection.
        eva_center, eva_output: Variants of ``eva``.
        seed: Seed of random directions and of randomised SVDs.
    """

    rank: int = 16
    whitening: Whitening = field(default_factory=Whitening)
    coordinates: Coordinates = "qr"
    svd_method: SvdMethod = "auto"
    filora_fisher: Fisher = "dense"
    eva_center: bool = False
    eva_output: EvaOutput = "weight_times_input"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ConfigError(f"The rank must be a positive integer, but {self.rank!r} came.")
        for name, value, allowed in (
            ("coordinates", self.coordinates, COORDINATES),
            ("svd_method", self.svd_method, SVD_METHODS),
            ("filora_fisher", self.filora_fisher, FISHERS),
            ("eva_output", self.eva_output, EVA_OUTPUTS),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, but {value!r} came.")


@dataclass(frozen=True)
class LayerEvidence:
    """What a constructor may look at in one layer.

    Attributes:
        name: The layer's name; together with the seed it fixes the layer's random directions.
        shape: (m, n): outputs, inputs.
        weight: Gives W (m x n, float) when asked, dequantised if need be.
        moments: Calibration moments; None for a constructor that needs no data.
    """

    name: str
    shape: tuple[int, int]
    weight: Callable[[], Tensor]
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
        """A seed of this layer's own, so that layers draw independently of their order."""
        return seeded_generator(seed, "layer", self.name).initial_seed()


@dataclass(frozen=True)
class Constructor:
    """One way to choose a basis: the moments it needs under given options, and how it builds.

    Attributes:
        metric: The diagonal metric under which the leading singular triples of the whitened cross moment are all it
            reads, so that a sketch will do; None if it reads more.
        weights_only: The bases are a function of the layer's weight: the same for all data and seeds.
        initial_core: The basis brings a core to start from (``FrozenCoreConfig.initial_step``).
        label, colour: How reports call and draw it; by default by its name, in grey.
    """

    needs: Callable[[BasisOptions], frozenset[MomentName]]
    build: Callable[[LayerEvidence, BasisOptions], Basis]
    metric: Callable[[BasisOptions], Whitening | None] = lambda _: None
    weights_only: bool = False
    initial_core: bool = False
    label: str = ""
    colour: Colour = "grey"

    def needs_data(self, options: BasisOptions) -> bool:
        return bool(self.needs(options))


def _only_cross(_: BasisOptions) -> frozenset[MomentName]:
    return frozenset({"cross"})


def _nothing(_: BasisOptions) -> frozenset[MomentName]:
    return frozenset()


CONSTRUCTORS: dict[str, Constructor] = {
    "fcca": Constructor(
        lambda o: o.whitening.needs() | {"cross"},
        lambda layer, o: fcca_basis(
            layer.data, o.rank, whitening=o.whitening, coordinates=o.coordinates, svd_method=o.svd_method,
            seed=layer.seed(o.seed),
        ),
        lambda o: o.whitening if o.whitening.fisher == "diagonal" else None,
        label="FCCA", colour="orange",
    ),
    "rawgrad": Constructor(
        _only_cross,
        lambda layer, o: rawgrad_basis(
            layer.data, o.rank, coordinates=o.coordinates, svd_method=o.svd_method, seed=layer.seed(o.seed)
        ),
        lambda _: Whitening(sides="none"),
        label="RawGrad", colour="blue",
    ),
    "signgrad": Constructor(
        _only_cross,
        lambda layer, o: signgrad_basis(
            layer.data, o.rank, coordinates=o.coordinates, svd_method=o.svd_method, seed=layer.seed(o.seed)
        ),
        label="SignGrad", initial_core=True,
    ),
    "filora": Constructor(
        lambda o: filora_needs(o.filora_fisher),
        lambda layer, o: filora_basis(
            layer.data, o.rank, fisher=o.filora_fisher, coordinates=o.coordinates, seed=layer.seed(o.seed)
        ),
        label="FiLoRA-core",
    ),
    "eva": Constructor(
        lambda o: eva_needs(center=o.eva_center, output=o.eva_output),
        lambda layer, o: eva_basis(
            layer.data, layer.weight(), o.rank, center=o.eva_center, output=o.eva_output,
            coordinates=o.coordinates, seed=layer.seed(o.seed),
        ),
        label="EVA-core", colour="navy",
    ),
    "lora_xs": Constructor(
        _nothing,
        lambda layer, o: lora_xs_basis(
            layer.weight(), o.rank, coordinates=o.coordinates, svd_method=o.svd_method, seed=layer.seed(WEIGHT_SEED)
        ),
        label="LoRA-XS-core", weights_only=True,
    ),
    "milora": Constructor(
        _nothing,
        lambda layer, o: milora_basis(layer.weight(), o.rank, coordinates=o.coordinates),
        label="MiLoRA-core", weights_only=True,
    ),
    "random": Constructor(
        _nothing,
        lambda layer, o: random_basis(
            layer.shape, o.rank, coordinates=o.coordinates, seed=layer.seed(o.seed)
        ),
        label="Random",
    ),
    # The seed is not the layer's own: VeRA shares one pair among all layers.
    "vera": Constructor(
        _nothing,
        lambda layer, o: vera_basis(layer.shape, o.rank, coordinates=o.coordinates, seed=o.seed),
        label="VeRA-core",
    ),
}  # fmt: skip


def find_constructor(name: str) -> Constructor:
    """The table's row of that name.

    Raises:
        ConfigError: No such constructor; the nearest name is offered.
    """
    if name not in CONSTRUCTORS:
        raise ConfigError(unknown_name("constructor", str(name), CONSTRUCTORS))
    return CONSTRUCTORS[name]


def build_streamed_basis(constructor: str, layer: LayerEvidence, svd: TruncatedSVD, options: BasisOptions) -> Basis:
    """The basis of a constructor with a ``metric``, from singular triples and from moments without matrices."""
    metric = find_constructor(constructor).metric(options)
    assert metric is not None
    return fcca_basis_of_svd(
        svd, layer.data, options.rank, whitening=metric, coordinates=options.coordinates, seed=layer.seed(options.seed)
    )


def build_basis(constructor: str, layer: LayerEvidence, options: BasisOptions) -> Basis:
    """The named constructor's basis of one layer; errors carry the layer's name."""
    try:
        return find_constructor(constructor).build(layer, options)
    except CalibrationError as error:
        if layer.name in str(error):
            raise
        raise CalibrationError(f"Layer {layer.name!r}: {error}") from error
