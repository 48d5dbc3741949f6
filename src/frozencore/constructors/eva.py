"""EVA: the directions in which the layer's inputs have the most energy (paper, appendix C; Paischer et al., 2025).

    Q = top-r eigenvectors of E[xxᵀ],   P = orth(W Q) by default

The paper does not fix the output side. The other options are the leading directions of the outputs, a random basis,
and the leading left singular directions of W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, assert_never

from jaxtyping import Float

from frozencore.constructors.constructor import BasisOptions, Constructor, LayerData
from frozencore.device import torch
from frozencore.maths.basis import Coordinates, LayerBasis, basis_from_factors
from frozencore.maths.linalg import (
    effective_rank,
    energy_rank,
    fitting_rank,
    seeded_generator,
    top_eigenvectors,
    truncated_svd,
)
from frozencore.maths.moments import DenseMoment, LayerMoments, MomentName

EvaOutput = Literal["weight_times_input", "output_pca", "random", "weight_svd"]


@dataclass
class EvaOptions(BasisOptions):
    """Variants of EVA."""

    eva_center: Annotated[bool, "Subtract the mean first: variance instead of energy."] = False
    eva_output: Annotated[EvaOutput, "The source of the output side."] = "weight_times_input"


def eva_basis(
    moments: LayerMoments,
    W: Float[torch.Tensor, "m n"],
    rank: int,
    *,
    center: bool = EvaOptions.eva_center,
    output: EvaOutput = EvaOptions.eva_output,
    coordinates: Coordinates = "qr",
    seed: int = 0,
) -> LayerBasis:
    """Take the leading input directions, and an output side that depends on them or is chosen separately.

    Args:
        center: Subtract the mean first: variance instead of energy.

    >>> moments = LayerMoments(1, input_outer=torch.diag(torch.tensor([1.0, 9.0])))
    >>> eva_basis(moments, W=torch.eye(2), rank=1).Q.abs().squeeze().tolist()
    [0.0, 1.0]
    """
    rank = fitting_rank(rank, W.shape)
    V, energy = _leading(moments, "input_outer", "input_total", center, rank)
    Q0 = V[:, : energy_rank(energy)]
    if output == "weight_times_input":
        image = W.double() @ Q0.to(W.device).double()
        U, S, _ = truncated_svd(image, rank, method="full")
        k = effective_rank(S)
        P0 = image if k == Q0.shape[1] else U[:, :k]
    elif output == "output_pca":
        U, output_energy = _leading(moments, "output_outer", "output_total", center, rank)
        P0 = U[:, : energy_rank(output_energy)]
    elif output == "random":
        generator = seeded_generator(seed, "eva", "P")
        P0 = torch.randn(W.shape[0], rank, generator=generator, dtype=torch.float32, device="cpu").to(W.device)
    elif output == "weight_svd":
        P0 = truncated_svd(W.float(), rank, seed=seed).U
    else:
        assert_never(output)
    return basis_from_factors(
        P0, Q0, rank=rank, spectrum=energy, coordinates=coordinates, seed=seed,
        diagonals=lambda: (None, moments.A.diagonal()),
    )  # fmt: skip


def _leading(
    moments: LayerMoments, outer: DenseMoment, total: MomentName, center: bool, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    second = moments.mean(outer)
    if center:
        mean = moments.mean(total).double()
        second = (second.double() - mean.outer(mean)).to(second.dtype)
    return top_eigenvectors(second, rank)


class Eva(Constructor[EvaOptions]):
    options = EvaOptions
    label = "EVA-core"
    basis_source = "inputs"

    def needs(self, options: EvaOptions) -> frozenset[MomentName]:
        """The moments that the chosen variant reads; none needs a backward pass."""
        outer: set[MomentName] = {"input_outer"}
        total: set[MomentName] = {"input_total"}
        if options.eva_output == "output_pca":
            outer.add("output_outer")
            total.add("output_total")
        return frozenset(outer | total if options.eva_center else outer)

    def build(self, layer: LayerData, options: EvaOptions) -> LayerBasis:
        return eva_basis(
            layer.data, layer.weight(), options.r, center=options.eva_center, output=options.eva_output,
            coordinates=options.coordinates, seed=layer.seed(options.seed),
        )  # fmt: skip
