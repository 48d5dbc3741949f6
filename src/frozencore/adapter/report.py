"""Report on the layers of a saved adapter: its basis, what it captures of moments, and its angles to another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from frozencore.adapter.basis import Basis
from frozencore.errors import ArtifactError
from frozencore.maths.basis import LayerBasis, known_basis
from frozencore.maths.capture import coherence, measure_capture
from frozencore.maths.linalg import effective_rank, principal_cosines, truncated_svd
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening
from frozencore.options import without_lists
from frozencore.text import natural_sort_key

T = TypeVar("T")


@dataclass(frozen=True)
class LayerReport:
    """One layer's basis; what takes moments or another adapter is None without them.

    Attributes:
        num_values: r².
        output_coherence, input_coherence: Largest leverage of a row of P and of Q over the mean; 1 means evenly spread,
            m/r (or n/r) means single coordinates only.
        core_norm: ``‖R‖_F``, the distance that training moved the core.
        gradient_norm, gradient_share: ``‖PᵀGQ‖_F``, and its ratio to ``‖G‖_F``.
        correlation, correlation_share: J, and its ratio to the best rank-r value ``Σ_{i≤r} σ_i(T)²``.
        singular_values, effective_rank: The first r values of the whitened cross moment T, and their effective rank.
        input_spread, error_spread: Maximum over median of a and d.
        output_cosine, input_cosine: Mean cosine of the principal angles to the other basis; 1 is the same span.
    """

    shape: tuple[int, int]
    rank: int
    num_values: int
    basis_bytes: int
    orthonormality_error: float
    output_coherence: float
    input_coherence: float
    core_norm: float
    gradient_norm: float | None = None
    gradient_share: float | None = None
    correlation: float | None = None
    correlation_share: float | None = None
    singular_values: tuple[float, ...] | None = None
    effective_rank: int | None = None
    input_spread: float | None = None
    error_spread: float | None = None
    output_cosine: float | None = None
    input_cosine: float | None = None


def inspect_adapter(
    basis: Basis,
    cores: Mapping[str, Tensor] | None = None,
    *,
    moments: Mapping[str, LayerMoments] | None = None,
    other: Mapping[str, LayerBasis] | None = None,
) -> dict[str, LayerReport]:
    """Report on every layer of a saved adapter, in the order of layer numbers.

    Args:
        cores: R by layer name; zero without them.
        moments: Must hold every layer's G, a and d.
        other: Another basis of the same layers.
    """
    metric, reports = Whitening(damping=without_lists(basis.options["damping"])), {}
    for name, own in sorted(basis.layers.items(), key=lambda item: natural_sort_key(item[0])):
        report = report_basis(own, None if cores is None else cores[name])
        if (measured := _same_layer(moments, name, "moments file")) is not None:
            report = with_capture(report, own, measured, metric)
        if (peer := _same_layer(other, name, "other adapter")) is not None:
            report = with_angles(report, own, peer)
        reports[name] = report
    return reports


def report_basis(own: LayerBasis, R: Tensor | None = None) -> LayerReport:
    """Report on a basis and a core alone."""
    P, Q = own.P.float(), own.Q.float()
    return LayerReport(
        shape=(P.shape[0], Q.shape[0]),
        rank=own.rank,
        num_values=own.rank**2,
        basis_bytes=sum(X.numel() * X.element_size() for X in (own.P, own.Q)),
        orthonormality_error=own.orthonormality_error(),
        output_coherence=coherence(torch.linalg.qr(P).Q),
        input_coherence=coherence(torch.linalg.qr(Q).Q),
        core_norm=0.0 if R is None else float(R.norm()),
    )


def with_capture(report: LayerReport, own: LayerBasis, moments: LayerMoments, metric: Whitening) -> LayerReport:
    """Add what a basis captures of moments in a diagonal metric."""
    basis, G = known_basis(own.P.float(), own.Q.float()), moments.G
    if G.shape != report.shape:
        raise ArtifactError(f"A basis of shape {report.shape} met moments of shape {tuple(G.shape)}.")
    found = measure_capture(moments, basis, metric)
    S = torch.zeros(basis.rank)
    if found.energy:
        S = truncated_svd(metric.input_root(moments)(metric.output_root(moments)(G).mT).mT, basis.rank).S
    return replace(
        report,
        gradient_norm=found.gradient,
        gradient_share=found.gradient / found.gradient_total if found.gradient_total else 0.0,
        correlation=found.J,
        correlation_share=found.J / float(S.double().square().sum()) if found.J else 0.0,
        singular_values=tuple(S.tolist()),
        effective_rank=effective_rank(S),
        input_spread=found.input_spread,
        error_spread=found.error_spread,
    )


def with_angles(report: LayerReport, own: LayerBasis, other: LayerBasis) -> LayerReport:
    """Add how close a basis is to another one of the same layer."""
    if report.shape != (theirs := (other.P.shape[0], other.Q.shape[0])):
        raise ArtifactError(
            f"Only bases of the same model compare, but a layer is {report.shape[0]} x {report.shape[1]} in one "
            f"adapter and {theirs[0]} x {theirs[1]} in the other."
        )
    return replace(
        report,
        output_cosine=float(principal_cosines(own.P, other.P).mean()),
        input_cosine=float(principal_cosines(own.Q, other.Q).mean()),
    )


def _same_layer(layers: Mapping[str, T] | None, name: str, what: str) -> T | None:
    if layers is not None and name not in layers:
        raise ArtifactError(f"The {what} has no layer {name!r}: it was made for other targets or another model.")
    return None if layers is None else layers[name]
