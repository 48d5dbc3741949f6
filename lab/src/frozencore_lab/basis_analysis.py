"""Numbers that compare two bases: coherence, shares of the gradient and of J (:mod:`frozencore.maths.capture`), angles.

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
from frozencore.maths.capture import measure_capture
from frozencore.maths.linalg import principal_cosines, truncated_svd
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening
from frozencore.options import without_lists
from frozencore_lab.campaign.moments_file import load_moments


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
    A_root, D_root = metric.inverse_roots(moments)
    T = A_root(D_root(moments.G).mT).mT
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
