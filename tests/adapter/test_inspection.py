"""The numbers of ``inspect`` against numbers known from theory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drawn import drawn_layer
from frozencore import Basis, LayerMoments, fcca_basis, random_basis, rawgrad_basis
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.folders import Factors
from frozencore.adapter.inspection import inspect_adapter, report_angles, report_basis, report_capture
from frozencore.errors import ArtifactError

DAMPING = (1e-3, 1e-3)


def draw_moments(m: int, n: int) -> LayerMoments:
    return drawn_layer(m, n).moments(torch.float32)


@pytest.fixture
def factors() -> Factors:
    basis = fcca_basis(draw_moments(12, 20), 4)
    return Factors(P=basis.P, Q=basis.Q, R=torch.full((4, 4), 0.5))


def test_fcca_captures_all_that_its_rank_can() -> None:
    moments = draw_moments(12, 20)
    own = report_capture(*_pq(fcca_basis(moments, 4)), moments, DAMPING)
    other = report_capture(*_pq(random_basis((12, 20), 4)), moments, DAMPING)
    assert own.correlation_share == pytest.approx(1, abs=1e-5)
    assert other.correlation_share < own.correlation_share
    assert own.correlation == pytest.approx(sum(s**2 for s in own.singular_values), rel=1e-5)


def test_rawgrad_holds_the_most_gradient() -> None:
    moments = draw_moments(12, 20)
    best = report_capture(*_pq(rawgrad_basis(moments, 4)), moments, DAMPING)
    largest = torch.linalg.svdvals(moments.G.double())[:4].square().sum().sqrt()
    assert best.gradient_norm == pytest.approx(float(largest), rel=1e-5)
    assert best.gradient_share < 1


def test_a_basis_on_single_coordinates_is_fully_coherent() -> None:
    report = report_basis(torch.eye(12)[:, :4], torch.eye(20)[:, :4], torch.zeros(4, 4))
    assert (report.output_coherence, report.input_coherence) == (pytest.approx(3), pytest.approx(5))
    assert (report.num_values, report.basis_bytes, report.core_norm) == (16, 4 * 4 * 32, 0)


def test_angles_are_one_to_itself_in_other_coordinates_and_zero_to_the_complement(factors: Factors) -> None:
    mixed = factors.P @ torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    assert report_angles(factors.P, factors.Q, mixed, factors.Q).output_cosine == pytest.approx(1, abs=1e-5)
    eye = torch.eye(12)
    assert report_angles(eye[:, :4], factors.Q, eye[:, 4:8], factors.Q).output_cosine == pytest.approx(0, abs=1e-6)


def test_moments_or_a_peer_without_the_layer_are_refused(factors: Factors) -> None:
    config = FrozenCoreConfig(r=4)
    with pytest.raises(ArtifactError, match="moments file has no layer 'a'"):
        inspect_adapter(config, {"a": factors}, moments={"b": draw_moments(12, 20)})
    with pytest.raises(ArtifactError, match="other adapter has no layer 'a'"):
        inspect_adapter(config, {"a": factors}, other={})
    with pytest.raises(ArtifactError, match="met moments of shape"):
        inspect_adapter(config, {"a": factors}, moments={"a": draw_moments(20, 12)})


def _pq(basis: Basis) -> tuple[torch.Tensor, torch.Tensor]:
    return basis.P, basis.Q


def test_bases_of_layers_of_other_shapes_do_not_compare(factors: Factors) -> None:
    with pytest.raises(ArtifactError, match="12 x 20 in one adapter and 20 x 12"):
        report_angles(factors.P, factors.Q, factors.Q, factors.P)


def test_a_layer_without_gradient_is_reported_and_not_an_error(factors: Factors) -> None:
    zero = replace(draw_moments(12, 20), cross=torch.zeros(12, 20), error_square=torch.zeros(12))
    report = report_capture(factors.P, factors.Q, zero, DAMPING)
    assert (report.gradient_norm, report.correlation_share, report.effective_rank) == (0, 0, 0)
