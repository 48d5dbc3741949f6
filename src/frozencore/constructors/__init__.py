"""The table of basis constructors. Adding one is one file here and one row below.

A constructor file holds a pure function on tensors, and its options if it has any of its own; the row says what it
reads and how the options reach it. Whatever else knows options (configurations, campaigns, flags) reads this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from frozencore.constructors.eva import EvaOptions, eva_basis, eva_needs
from frozencore.constructors.evidence import LayerEvidence
from frozencore.constructors.fcca import FCCAOptions, fcca_basis, fcca_basis_of_svd, whitened_cross_moment
from frozencore.constructors.filora import FiLoRAOptions, filora_basis, filora_needs
from frozencore.constructors.lora_xs import lora_xs_basis
from frozencore.constructors.milora import milora_basis
from frozencore.constructors.options import BasisOptions
from frozencore.constructors.random import random_basis
from frozencore.constructors.rawgrad import rawgrad_basis
from frozencore.constructors.signgrad import SignGradOptions, signgrad_basis
from frozencore.constructors.vera import vera_basis
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.basis import Basis
from frozencore.maths.linalg import TruncatedSVD
from frozencore.maths.moments import DIAGONAL_OF, DIAGONALS, LayerMoments, MomentName
from frozencore.maths.whitening import Whitening
from frozencore.options import Option, options_of
from frozencore.words import unknown_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CONSTRUCTORS", "BasisOptions", "Colour", "Constructor", "EvaOptions", "FCCAOptions", "FiLoRAOptions",
    "LayerEvidence", "SignGradOptions", "build_basis", "constructor_options", "described", "eva_basis", "fcca_basis",
    "filora_basis", "find_constructor", "lora_xs_basis", "milora_basis", "random_basis", "rawgrad_basis", "readers",
    "refuse_unread", "signgrad_basis", "vera_basis",
]  # fmt: skip

Colour = Literal["orange", "blue", "navy", "grey", "black"]
WEIGHT_SEED = 0  # directions of the weight alone are the same under every seed


@dataclass(frozen=True)
class Constructor:
    """One way to choose a basis: the moments it needs under given options, and how it builds.

    Attributes:
        options: What it is told.
        metric: The diagonal metric under which the leading singular triples of the whitened cross moment are all it
            reads, so that a sketch will do; None if it reads more.
        matrix: What it takes the leading singular directions of; the squares of their singular values are what they are
            worth, by which a rank budget is spent. None if no spectrum of its tells that: ranks are then equal.
        weights_only: The bases are a function of the layer's weight: the same for all data and seeds.
        label, colour: How reports call and draw it; by default by its name, in grey.
    """

    needs: Callable[[Any], frozenset[MomentName]]
    build: Callable[[LayerEvidence, Any], Basis]
    metric: Callable[[Any], Whitening | None] = lambda _: None
    matrix: Callable[[LayerMoments, Any], Tensor] | None = None
    options: type[BasisOptions] = BasisOptions
    weights_only: bool = False
    label: str = ""
    colour: Colour = "grey"

    def needs_data(self, options: BasisOptions) -> bool:
        return bool(self.needs(options))


def _with_cross(needs: frozenset[MomentName], options: BasisOptions) -> frozenset[MomentName]:
    """These moments, G, and the diagonals that Fisher coordinates are measured by."""
    diagonals = DIAGONALS - {vector for vector, matrix in DIAGONAL_OF.items() if matrix in needs}
    return (diagonals if options.coordinates == "fisher" else frozenset[MomentName]()) | needs | {"cross"}


def _cross(options: BasisOptions) -> frozenset[MomentName]:
    return _with_cross(frozenset(), options)


def _nothing(_: BasisOptions) -> frozenset[MomentName]:
    return frozenset()


CONSTRUCTORS: dict[str, Constructor] = {
    "fcca": Constructor(
        lambda o: _with_cross(o.whitening.needs(), o),
        lambda layer, o: fcca_basis(
            layer.data, o.rank, whitening=o.whitening, coordinates=o.coordinates, svd_method=o.svd_method,
            seed=layer.seed(o.seed),
        ),
        lambda o: o.whitening if o.whitening.fisher == "diagonal" else None,
        lambda moments, o: whitened_cross_moment(moments, o.whitening),
        label="FCCA", colour="orange", options=FCCAOptions,
    ),
    "rawgrad": Constructor(
        _cross,
        lambda layer, o: rawgrad_basis(
            layer.data, o.rank, coordinates=o.coordinates, svd_method=o.svd_method, seed=layer.seed(o.seed)
        ),
        lambda _: Whitening(sides="none"),
        lambda moments, _: moments.G,
        label="RawGrad", colour="blue",
    ),
    "signgrad": Constructor(
        _cross,
        lambda layer, o: signgrad_basis(
            layer.data, o.rank, coordinates=o.coordinates, svd_method=o.svd_method, seed=layer.seed(o.seed)
        ),
        matrix=lambda moments, _: moments.G.sign(),
        label="SignGrad", options=SignGradOptions,
    ),
    "filora": Constructor(
        lambda o: filora_needs(o.filora_fisher),
        lambda layer, o: filora_basis(
            layer.data, o.rank, fisher=o.filora_fisher, coordinates=o.coordinates, seed=layer.seed(o.seed)
        ),
        label="FiLoRA-core", options=FiLoRAOptions,
    ),
    "eva": Constructor(
        lambda o: eva_needs(center=o.eva_center, output=o.eva_output),
        lambda layer, o: eva_basis(
            layer.data, layer.weight(), o.rank, center=o.eva_center, output=o.eva_output,
            coordinates=o.coordinates, seed=layer.seed(o.seed),
        ),
        label="EVA-core", colour="navy", options=EvaOptions,
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

if TYPE_CHECKING:  # editors cannot see fields that are made from a table: of ours they are told here

    @dataclass(frozen=True)
    class EveryOption(FCCAOptions, FiLoRAOptions, EvaOptions, SignGradOptions):
        rank: int = field(init=False)

else:
    EveryOption = object


def find_constructor(name: str) -> Constructor:
    """The table's row of that name.

    Raises:
        ConfigError: No such constructor; the nearest name is offered.
    """
    if not isinstance(name, str) or name not in CONSTRUCTORS:
        raise ConfigError(unknown_name("constructor", str(name), CONSTRUCTORS))
    return CONSTRUCTORS[name]


def constructor_options() -> dict[str, Option]:
    """The options of all constructors by name; rank and seed are those of the adapter or the run."""
    return {
        name: option
        for row in CONSTRUCTORS.values()
        for name, option in options_of(row.options).items()
        if name not in ("rank", "seed")
    }


def readers(option: str) -> tuple[str, ...]:
    """The constructors that read an option; all of them for one that is not theirs, such as a scale."""
    found = tuple(name for name, row in CONSTRUCTORS.items() if option in options_of(row.options))
    return found or tuple(CONSTRUCTORS)


def described(option: Option) -> str:
    """The help of an option, and whose it is if not every constructor reads it."""
    own = readers(option.name)
    return option.help if len(own) == len(CONSTRUCTORS) else f"{', '.join(own)}: {option.help}"


def refuse_unread(constructor: str, given: Mapping[str, Any]) -> None:
    """Refuse options that say something to another constructor: they would change nothing, unseen.

    Args:
        constructor: One of the table, or any other method, which reads none of them.

    Raises:
        ConfigError: The first that is not at its default.
    """
    known = constructor_options()
    for name, value in given.items():
        if constructor not in readers(name) and not (name in known and value == known[name].default):
            raise ConfigError(
                f"The method {constructor!r} does not read {name} (it is for {', '.join(readers(name))}). Leave it out."
            )


def build_streamed_basis(constructor: str, layer: LayerEvidence, svd: TruncatedSVD, options: BasisOptions) -> Basis:
    """The basis of a constructor with a ``metric``, from singular triples and from moments without matrices."""
    metric = find_constructor(constructor).metric(options)
    assert metric is not None
    return fcca_basis_of_svd(
        svd, layer.data, options.rank, whitening=metric, coordinates=options.coordinates, seed=layer.seed(options.seed)
    )


def build_basis(constructor: str, layer: LayerEvidence, options: BasisOptions) -> Basis:
    """The named constructor's basis of one layer; errors carry the layer's name.

    Args:
        options: Of the class in the constructor's row; plain ones mean its defaults for the rest.
    """
    row = find_constructor(constructor)
    try:
        return row.build(layer, row.options(**vars(options)) if type(options) is BasisOptions else options)
    except CalibrationError as error:
        if layer.name in str(error):
            raise
        raise CalibrationError(f"Layer {layer.name!r}: {error}") from error
