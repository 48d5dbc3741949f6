"""FiLoRA: eigenspaces of the two marginal Fisher factors, without their pairing (paper, appendix C).

    P = top-r eigenvectors of D = E[δδᵀ],   Q = top-r eigenvectors of A = E[xxᵀ]

With diagonal factors the eigenvectors are coordinates: the r outputs with the largest d, the r inputs with the
largest a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from frozencore.constructors.constructor import BasisOptions, Constructor, LayerData
from frozencore.device import torch
from frozencore.maths.basis import Coordinates, LayerBasis, basis_from_factors
from frozencore.maths.linalg import energy_rank, fitting_rank, top_eigenvectors
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.maths.whitening import Fisher


@dataclass
class FiLoRAOptions(BasisOptions):
    """The original method, or its diagonal variant."""

    filora_fisher: Annotated[
        Fisher, "Eigenvectors of dense factors (the original method), or coordinates of diagonal ones."
    ] = "dense"


def filora_needs(fisher: Fisher) -> frozenset[MomentName]:
    """The moments that the dense or the diagonal variant reads."""
    return frozenset({"input_outer", "error_outer"} if fisher == "dense" else {"input_square", "error_square"})


def filora_basis(
    moments: LayerMoments,
    rank: int,
    *,
    fisher: Fisher = FiLoRAOptions.filora_fisher,
    coordinates: Coordinates = "qr",
    seed: int = 0,
) -> LayerBasis:
    """Take the directions with the most energy, separately for inputs and output errors.

    The spectrum is the products of the two sides' eigenvalues.

    >>> moments = LayerMoments(1, input_square=torch.tensor([1.0, 9.0]), error_square=torch.tensor([4.0, 2.0]))
    >>> basis = filora_basis(moments, rank=1, fisher="diagonal")
    >>> basis.P.abs().squeeze().tolist(), basis.Q.abs().squeeze().tolist(), basis.spectrum.tolist()
    ([1.0, 0.0], [0.0, 1.0], [36.0])
    """
    if fisher == "dense":
        rank = fitting_rank(rank, (len(moments.total("input_outer")), len(moments.total("error_outer"))))
        (Q0, input_energy), (P0, error_energy) = (
            top_eigenvectors(moments.mean(name), rank) for name in ("input_outer", "error_outer")
        )
    else:
        rank = fitting_rank(rank, (len(moments.a), len(moments.d)))
        (Q0, input_energy), (P0, error_energy) = (_largest(energy, rank) for energy in (moments.a, moments.d))
    return basis_from_factors(
        P0[:, : energy_rank(error_energy)], Q0[:, : energy_rank(input_energy)], rank=rank,
        spectrum=input_energy * error_energy, coordinates=coordinates, seed=seed,
        diagonals=lambda: moments.diagonals(filora_needs(fisher)),
    )  # fmt: skip


def _largest(factor: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    energy, index = factor.sort(descending=True, stable=True)
    return torch.nn.functional.one_hot(index[:rank], factor.shape[0]).mT.to(factor.dtype), energy[:rank]


class FiLoRA(Constructor[FiLoRAOptions]):
    options = FiLoRAOptions
    label = "FiLoRA-core"
    basis_source = "marginals"

    def needs(self, options: FiLoRAOptions) -> frozenset[MomentName]:
        return filora_needs(options.filora_fisher)

    def build(self, layer: LayerData, options: FiLoRAOptions) -> LayerBasis:
        return filora_basis(
            layer.data, options.r, fisher=options.filora_fisher, coordinates=options.coordinates,
            seed=layer.seed(options.seed),
        )  # fmt: skip
