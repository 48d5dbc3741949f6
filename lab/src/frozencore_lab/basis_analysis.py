"""The value of a basis: the local Fisher objective (paper, eq. 1, theorem 1), and numbers that compare two bases.

    minimise over rank(ΔW) ≤ r   ⟨G, ΔW⟩ + 1/(2η) ‖D^1/2 ΔW A^1/2‖²_F
    T = D^-1/2 G A^-1/2,   C = (PᵀDP)^-1/2 PᵀGQ (QᵀAQ)^-1/2,   J = ‖C‖²_F ≤ ‖T‖²_F

Letters: G (m x n) cross moment, A (n) and D (m) damped second moments, as vectors (diagonal) or matrices (dense),
P (m x r) and Q (n x r) a basis, C r x r, η the step, s the adapter scale. What a run records of its own bases is in
:mod:`frozencore.maths.capture`.

    python -m frozencore_lab.basis_analysis ADAPTER [--moments FILE] [--against OTHER]

prints the numbers of each layer as JSON.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from frozencore.adapter.basis import Basis
from frozencore.adapter.folders import read_basis
from frozencore.maths.basis import LayerBasis
from frozencore.maths.capture import core_gradient, measure_capture, times, whitened_core
from frozencore.maths.linalg import principal_cosines, truncated_svd
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening
from frozencore.options import without_lists
from frozencore_lab.campaign.moments_file import load_moments


def local_objective(G: Float[Tensor, "m n"], A: Tensor, D: Tensor, delta_W: Float[Tensor, "m n"], step: float) -> float:
    """The value of the local objective at an update ``delta_W``; negative is an improvement.

    >>> G, A, D = torch.eye(2), torch.ones(2), torch.ones(2)
    >>> local_objective(G, A, D, -G, step=1.0)
    -1.0
    """
    linear = (G.double() * delta_W.double()).sum()
    metric = (delta_W.double() * times(D, times(A, delta_W.mT).mT)).sum()
    return float(linear + metric / (2 * step))


def projected_gradient_norm(G: Float[Tensor, "m n"], basis: LayerBasis) -> float:
    """``‖PᵀGQ‖_F``: the gradient that reaches a zero core (paper, section 3.1)."""
    return float(core_gradient(G, basis).norm())


def captured_correlation(G: Float[Tensor, "m n"], A: Tensor, D: Tensor, basis: LayerBasis) -> float:
    """``J = ‖(PᵀDP)^-1/2 PᵀGQ (QᵀAQ)^-1/2‖²_F``: the squared whitened gradient inside the span.

    It depends on the spans only, and no basis of rank r exceeds ``Σ_{i≤r} σ_i(T)²``, which FCCA reaches.
    """
    return float(whitened_core(core_gradient(G, basis), A, D, basis).square().sum())


def closed_form_core(
    G: Float[Tensor, "m n"], A: Tensor, D: Tensor, basis: LayerBasis, *, step: float = 1.0, scale: float = 1.0
) -> Float[Tensor, "r r"]:
    """The core that minimises the local objective: ``R* = -(η/s) (PᵀDP)^-1 PᵀGQ (QᵀAQ)^-1``.

    >>> basis = LayerBasis(torch.eye(2)[:, :1], torch.eye(2)[:, :1], torch.ones(1), 1)
    >>> closed_form_core(torch.eye(2), torch.full((2,), 2.0), torch.ones(2), basis).item()
    -0.5
    """
    P, Q = basis.P.double(), basis.Q.double()
    half = torch.linalg.solve(P.mT @ times(D, P), core_gradient(G, basis))
    return -(step / scale) * torch.linalg.solve(Q.mT @ times(A, Q), half.mT).mT


def coherence(X: Float[Tensor, "m r"]) -> float:
    """The largest leverage score of the rows of ``span(X)`` over the mean ``r/m``.

    1 means evenly spread; m/r means single coordinates only.
    """
    num_rows, rank = X.shape
    return float(torch.linalg.qr(X.double()).Q.square().sum(1).max()) * num_rows / rank


def analyse(
    basis: Basis, *, moments: Mapping[str, LayerMoments] | None = None, other: Basis | None = None
) -> dict[str, dict[str, float]]:
    """Describe each layer of a basis.

    Args:
        moments: G, a and d of each layer: adds the share of the gradient inside the spans, and J's share of the largest
            J of this rank.
        other: A basis of the same layers: adds the mean cosines of the principal angles between the two.
    """
    found = {}
    for name, layer in basis.layers.items():
        numbers = {"coherence_P": coherence(layer.P), "coherence_Q": coherence(layer.Q)}
        if moments is not None:
            numbers |= shares(layer, moments[name], Whitening(damping=without_lists(basis.options["damping"])))
        if other is not None:
            for side in "PQ":
                cosines = principal_cosines(getattr(layer, side), getattr(other.layers[name], side))
                numbers[f"cosine_{side}"] = float(cosines.mean())
        found[name] = numbers
    return found


def shares(basis: LayerBasis, moments: LayerMoments, metric: Whitening) -> dict[str, float]:
    """The shares of ``‖G‖_F`` and of the best J that a basis captures in a diagonal metric; 0 without a gradient."""
    found = measure_capture(moments, basis, metric)
    if not found.J:
        return {"gradient_share": 0.0, "J_share_of_best": 0.0}
    T = metric.input_root(moments)(metric.output_root(moments)(moments.G).mT).mT
    best = truncated_svd(T, basis.rank).S.double().square().sum()
    return {"gradient_share": found.gradient / found.gradient_total, "J_share_of_best": found.J / float(best)}


def main() -> None:
    """Print the numbers of a saved adapter or basis."""
    parser = ArgumentParser(description="Analyse the bases of a saved adapter.")
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--moments", type=Path, help="A file of a campaign's folder shared/moments.")
    parser.add_argument("--against", type=Path, help="Another adapter or basis.")
    given = parser.parse_args()
    found = analyse(
        read_basis(given.adapter),
        moments=load_moments(given.moments) if given.moments else None,
        other=read_basis(given.against) if given.against else None,
    )
    json.dump(found, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
