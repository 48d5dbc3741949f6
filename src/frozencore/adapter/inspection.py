"""Compute the numbers of ``frozencore inspect`` from an adapter's factors and, if given, moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.saved.state import Factors
from frozencore.errors import ArtifactError
from frozencore.maths.basis import known_basis
from frozencore.maths.capture import capture, coherence
from frozencore.maths.linalg import effective_rank, principal_cosines, truncated_svd
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening
from frozencore.options import without_lists
from frozencore.words import natural_sort_key

T = TypeVar("T")


@dataclass(frozen=True)
class BasisReport:
    """One layer's basis on its own.

    Attributes:
        output_coherence, input_coherence: Largest leverage of a row of P and of Q over the mean; 1 means evenly spread,
            m/r (or n/r) means single coordinates only.
        num_values: r².
        core_norm: ``‖R‖_F``, the distance that training moved the core.
    """

    shape: tuple[int, int]
    rank: int
    num_values: int
    basis_bytes: int
    orthonormality_error: float
    output_coherence: float
    input_coherence: float
    core_norm: float


@dataclass(frozen=True)
class CaptureReport:
    """One layer's basis against its calibration moments.

    Attributes:
        gradient_norm, gradient_share: ``‖PᵀGQ‖_F``, and its ratio to ``‖G‖_F``.
        correlation, correlation_share: J, and its ratio to the best rank-r value ``Σ_{i≤r} σ_i(T)²``.
        singular_values, effective_rank: The first r values of the whitened cross moment T, and their effective rank.
        input_spread, error_spread: Maximum over median of a and d.
    """

    gradient_norm: float
    gradient_share: float
    correlation: float
    correlation_share: float
    singular_values: tuple[float, ...]
    effective_rank: int
    input_spread: float
    error_spread: float


@dataclass(frozen=True)
class AngleReport:
    """Mean cosine of the principal angles between two bases of one layer; 1 is the same span."""

    output_cosine: float
    input_cosine: float


@dataclass(frozen=True)
class LayerReport:
    """The reports on one layer; None without moments or without another adapter."""

    basis: BasisReport
    capture: CaptureReport | None
    angles: AngleReport | None


def inspect_adapter(
    config: FrozenCoreConfig,
    layers: Mapping[str, Factors],
    *,
    moments: Mapping[str, LayerMoments] | None = None,
    other: Mapping[str, Factors] | None = None,
) -> dict[str, LayerReport]:
    """Report on every layer of a saved adapter, in the order of layer numbers.

    Args:
        moments: Must hold every layer's G, a and d.
        other: Another adapter on the same layers.
    """
    damping = Whitening(damping=without_lists(config.damping)).damping_by_side
    reports = {}
    for name, own in sorted(layers.items(), key=lambda item: natural_sort_key(item[0])):
        measured, peer = _same_layer(moments, name, "moments file"), _same_layer(other, name, "other adapter")
        reports[name] = LayerReport(
            basis=report_basis(own.P, own.Q, own.R),
            capture=report_capture(own.P, own.Q, measured, damping) if measured else None,
            angles=report_angles(own.P, own.Q, peer.P, peer.Q) if peer else None,
        )
    return reports


def report_basis(P: Tensor, Q: Tensor, R: Tensor) -> BasisReport:
    """Report on a basis alone: P (m x r), Q (n x r), core R (r x r)."""
    basis = known_basis(P.float(), Q.float())
    orthonormal = [torch.linalg.qr(X.float()).Q for X in (P, Q)]
    return BasisReport(
        shape=(P.shape[0], Q.shape[0]),
        rank=basis.rank,
        num_values=R.numel(),
        basis_bytes=sum(X.numel() * X.element_size() for X in (P, Q)),
        orthonormality_error=basis.orthonormality_error(),
        output_coherence=coherence(orthonormal[0]),
        input_coherence=coherence(orthonormal[1]),
        core_norm=float(R.norm()),
    )


def report_capture(P: Tensor, Q: Tensor, moments: LayerMoments, damping: tuple[float, float]) -> CaptureReport:
    """Report on a basis and moments G, a, d, in the diagonal metric with that relative damping (input, output)."""
    basis, G, metric = known_basis(P.float(), Q.float()), moments.G, Whitening(damping=damping)
    if G.shape != (P.shape[0], Q.shape[0]):
        raise ArtifactError(f"A basis of shape {(P.shape[0], Q.shape[0])} met moments of shape {tuple(G.shape)}.")
    found = capture(moments, basis, metric)
    S = torch.zeros(basis.rank)
    if found.energy:
        S = truncated_svd(metric.input_root(moments)(metric.output_root(moments)(G).mT).mT, basis.rank).S
    return CaptureReport(
        gradient_norm=found.gradient,
        gradient_share=found.gradient / found.gradient_total if found.gradient_total else 0.0,
        correlation=found.J,
        correlation_share=found.J / float(S.double().square().sum()) if found.J else 0.0,
        singular_values=tuple(S.tolist()),
        effective_rank=effective_rank(S),
        input_spread=found.input_spread,
        error_spread=found.error_spread,
    )


def report_angles(P: Tensor, Q: Tensor, other_P: Tensor, other_Q: Tensor) -> AngleReport:
    """Report how close two bases of one layer are."""
    if (P.shape[0], Q.shape[0]) != (other_P.shape[0], other_Q.shape[0]):
        raise ArtifactError(
            f"Only bases of the same model compare, but a layer is {P.shape[0]} x {Q.shape[0]} in one adapter and "
            f"{other_P.shape[0]} x {other_Q.shape[0]} in the other."
        )
    return AngleReport(
        output_cosine=float(principal_cosines(P, other_P).mean()),
        input_cosine=float(principal_cosines(Q, other_Q).mean()),
    )


def _same_layer(layers: Mapping[str, T] | None, name: str, what: str) -> T | None:
    if layers is not None and name not in layers:
        raise ArtifactError(f"The {what} has no layer {name!r}: it was made for other targets or another model.")
    return None if layers is None else layers[name]
