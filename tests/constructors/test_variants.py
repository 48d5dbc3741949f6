"""What each constructor has of its own: its metric, its options, its draws."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import references as ref
from frozencore import (
    eva_basis,
    fcca_basis,
    filora_basis,
    lora_xs_basis,
    milora_basis,
    random_basis,
    rawgrad_basis,
    signgrad_basis,
    vera_basis,
)
from frozencore.constructors import BasisOptions, EvaOptions, LayerData, build_basis
from frozencore.maths.basis import LayerBasis
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening
from references import numpy_of
from tiny import drawn_layer

# --------------------------------------------------------------------------------------------- fcca and rawgrad

HUGE = 1e9


def assert_same_spans(one: LayerBasis, other: LayerBasis, tolerance: float = 1e-5) -> None:
    assert ref.span_distance(numpy_of(one.P), numpy_of(other.P)) < tolerance
    assert ref.span_distance(numpy_of(one.Q), numpy_of(other.Q)) < tolerance


def test_raw_coordinates_are_the_papers_factors_up_to_sign() -> None:
    layer = drawn_layer()
    basis = fcca_basis(layer.moments(), 4, coordinates="raw")
    P0, Q0 = ref.fcca_factors(layer.reference(), 4)
    np.testing.assert_allclose(np.abs(numpy_of(basis.P)), np.abs(P0), rtol=1e-4, atol=1e-5 * np.abs(P0).max())
    np.testing.assert_allclose(np.abs(numpy_of(basis.Q)), np.abs(Q0), rtol=1e-4, atol=1e-5 * np.abs(Q0).max())


def test_the_spectrum_is_that_of_the_whitened_moment() -> None:
    layer = drawn_layer()
    e = layer.reference()
    A, D = (ref.damped_matrix(np.diag(M), 1e-3) for M in (e.A, e.D))
    expected = ref.svd(ref.whitened(e.G, A, D))[1][:4]
    np.testing.assert_allclose(numpy_of(fcca_basis(layer.moments(), 4).spectrum), expected, rtol=1e-5)


@pytest.mark.parametrize("fisher", ["diagonal", "dense"])
def test_damping_both_sides_without_limit_is_rawgrad(fisher: str) -> None:
    moments = drawn_layer().moments()
    limit = fcca_basis(moments, 4, whitening=Whitening(fisher=fisher, damping=HUGE))
    assert_same_spans(limit, rawgrad_basis(moments, 4))
    torch.testing.assert_close(limit.P, rawgrad_basis(moments, 4).P, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("damping", "sides"), [((HUGE, 1e-3), "output"), ((1e-3, HUGE), "input")])
@pytest.mark.parametrize("fisher", ["diagonal", "dense"])
def test_damping_one_side_without_limit_whitens_the_other_alone(fisher: str, damping: tuple, sides: str) -> None:
    moments = drawn_layer().moments()
    limit = fcca_basis(moments, 4, whitening=Whitening(fisher=fisher, damping=damping))
    assert_same_spans(limit, fcca_basis(moments, 4, whitening=Whitening(whiten=sides, fisher=fisher)))


def test_whitening_undoes_a_change_of_units() -> None:
    """FCCA's update family is covariant: scaling input and output coordinates scales its factors alike."""
    layer = drawn_layer()
    rng = np.random.default_rng(7)
    u, v = 10 ** rng.uniform(-1, 1, 10), 10 ** rng.uniform(-1, 1, 12)
    whitening = Whitening(damping=1e-12)
    scaled = type(layer)(layer.X * u, layer.E * v, layer.W)
    one, other = (fcca_basis(each.moments(), 4, whitening=whitening) for each in (layer, scaled))
    # x → u∘x, δ → v∘δ: a direction q of the inputs becomes q/u, one of the outputs p/v.
    assert ref.span_distance(numpy_of(other.Q), numpy_of(one.Q) / u[:, None]) < 1e-4
    assert ref.span_distance(numpy_of(other.P), numpy_of(one.P) / v[:, None]) < 1e-4


# ------------------------------------------------------------------------------------------------------- milora


def test_milora_is_orthogonal_to_every_leading_direction() -> None:
    layer = drawn_layer(12, 10)
    W = torch.tensor(layer.W)
    minor, major = milora_basis(W, 3), lora_xs_basis(W, 7)
    np.testing.assert_allclose(numpy_of(minor.Q).T @ numpy_of(major.Q), 0, atol=1e-6)
    np.testing.assert_allclose(numpy_of(minor.spectrum), ref.svd(layer.W)[1][-3:], rtol=1e-6)


# ------------------------------------------------------------------------------------------------------ lora_xs


def test_singular_values_of_lora_xs_show_in_raw_coordinates_only() -> None:
    layer = drawn_layer()
    W = torch.tensor(layer.W)
    U, S, _ = ref.svd(layer.W)
    raw = numpy_of(lora_xs_basis(W, 3, coordinates="raw").P)
    np.testing.assert_allclose(np.abs(raw), np.abs(U[:, :3] * S[:3]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.abs(numpy_of(lora_xs_basis(W, 3).P)), np.abs(U[:, :3]), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- filora


def test_filora_with_diagonal_factors_selects_coordinates() -> None:
    layer = drawn_layer()
    e = layer.reference()
    basis = filora_basis(layer.moments(), 3, fisher="diagonal")
    for X, second_moment in ((basis.P, np.diag(e.D)), (basis.Q, np.diag(e.A))):
        chosen = np.argsort(-second_moment)[:3]
        np.testing.assert_array_equal(numpy_of(X), np.eye(len(second_moment))[:, chosen])


# ---------------------------------------------------------------------------------------------------------- eva


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("output", ["weight_times_input", "output_pca"])
def test_eva_equals_the_reference(center: bool, output: str) -> None:
    layer = drawn_layer(mean=3.0)
    basis = build_basis("eva", layer.evidence(), EvaOptions(r=3, eva_center=center, eva_output=output))
    P0, Q0 = ref.eva_factors(layer.reference(), 3, center=center, output_pca=output == "output_pca")
    assert ref.span_distance(numpy_of(basis.P), P0) < 1e-5
    assert ref.span_distance(numpy_of(basis.Q), Q0) < 1e-5


def test_evas_raw_output_side_is_the_image_of_its_input_side() -> None:
    layer = drawn_layer()
    raw = eva_basis(layer.moments(), torch.tensor(layer.W), 3, coordinates="raw")
    np.testing.assert_allclose(numpy_of(raw.P), layer.W @ numpy_of(raw.Q), rtol=0, atol=1e-5)


def test_evas_random_output_side_is_the_same_in_every_version() -> None:
    layer = drawn_layer()
    P = eva_basis(layer.moments(), torch.tensor(layer.W), 3, output="random", coordinates="raw", seed=7).P
    assert P.shape == (12, 3)
    np.testing.assert_allclose(numpy_of(P)[0], [-0.18249, -0.05074, 0.23054], atol=2e-5)


def test_evas_other_output_sides_leave_its_inputs_alone() -> None:
    layer = drawn_layer()
    W = torch.tensor(layer.W)
    plain = eva_basis(layer.moments(), W, 3)
    svd = eva_basis(layer.moments(), W, 3, output="weight_svd")
    drawn = eva_basis(layer.moments(), W, 3, output="random", seed=3)
    assert torch.equal(plain.Q, svd.Q)
    assert torch.equal(plain.Q, drawn.Q)
    assert ref.span_distance(numpy_of(svd.P), ref.lora_xs_factors(layer.reference(), 3)[0]) < 1e-5
    assert torch.equal(drawn.P, eva_basis(layer.moments(), W, 3, output="random", seed=3).P)
    assert not torch.allclose(drawn.P, eva_basis(layer.moments(), W, 3, output="random", seed=4).P)


@pytest.mark.usefixtures("as_a_user")
def test_an_output_side_that_eva_has_not_is_refused() -> None:
    with pytest.raises(AssertionError, match="'pca'"):
        eva_basis(drawn_layer().moments(), torch.eye(12, 10), 3, output="pca")


def test_evas_output_side_survives_a_weight_that_kills_a_direction() -> None:
    layer = drawn_layer(12, 10)
    Q = ref.top_eigenspace(layer.reference().A, 3)
    W = layer.W - layer.W @ np.outer(Q[:, 1], Q[:, 1])
    basis = eva_basis(layer.moments(), torch.tensor(W), 3)
    assert basis.orthonormality_error() < 1e-6
    assert basis.effective_rank == 2
    kept = W @ Q[:, [0, 2]]
    assert ref.span_distance(numpy_of(basis.P)[:, :2], kept) < 1e-5


# ---------------------------------------------------------------------------------------------- vera and random


def evidence(name: str, shape: tuple[int, int]) -> LayerData:
    return LayerData(name, shape, lambda: torch.empty(shape))


def test_vera_shares_one_pair_and_slices_it() -> None:
    options = BasisOptions(r=4, coordinates="raw", seed=2)
    wide = build_basis("vera", evidence("a", (1500, 30)), options)
    for name, shape in (("b", (1500, 30)), ("c", (1100, 12)), ("d", (20, 30)), ("e", (5, 6)), ("f", (3, 30))):
        other = build_basis("vera", evidence(name, shape), options)  # (3, 30) has a smaller rank
        torch.testing.assert_close(other.P, wide.P[: shape[0], : other.rank], rtol=0, atol=0)
        torch.testing.assert_close(other.Q, wide.Q[: shape[1], : other.rank], rtol=0, atol=0)


def test_vera_draws_gaussians_and_its_two_sides_differ() -> None:
    raw = vera_basis((4000, 4000), 4, coordinates="raw")
    assert float(raw.P.mean()) == pytest.approx(0, abs=0.03)
    assert float(raw.P.std()) == pytest.approx(1, abs=0.03)
    assert abs(float((raw.P * raw.Q).mean())) < 0.03
    assert not any(bool((block == later).any()) for block, later in pairwise(raw.P[:3072].split(1024)))


DRAWS = {  # P[0, :2] and Q[0, :2]
    "random": ([2.02923, -0.5932], [0.00518, -0.41677]),
    "vera": ([0.86013, 0.9977], [-0.6955, 0.16434]),
    "lora_xs": ([-0.00546, 0.03432], [0.03398, 0.27207]),  # a weight of zeros: completions alone
}


@pytest.mark.parametrize("constructor", DRAWS)
def test_a_seed_means_the_same_directions_in_every_version(constructor: str) -> None:
    """A recorded configuration makes the same bases again, so names of random draws must not change."""
    layer = LayerData("layer.0", (30, 20), lambda: torch.zeros(30, 20))
    basis = build_basis(constructor, layer, BasisOptions(r=4, coordinates="raw", seed=7))
    for X, expected in zip((basis.P, basis.Q), DRAWS[constructor], strict=True):
        np.testing.assert_allclose(numpy_of(X)[0, :2], expected, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("constructor", ["random", "vera", "eva"])
def test_draws_do_not_depend_on_torchs_default_dtype(constructor: str, dtype: torch.dtype) -> None:
    layer = drawn_layer().evidence()
    options = EvaOptions(r=4, eva_output="random") if constructor == "eva" else BasisOptions(r=4)
    expected = build_basis(constructor, layer, options)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        basis = build_basis(constructor, layer, options)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(basis.P, expected.P)
    assert torch.equal(basis.Q, expected.Q)


def test_random_draws_every_layer_and_side_independently() -> None:
    options = BasisOptions(r=4, seed=2)
    one, two = (build_basis("random", evidence(name, (30, 30)), options) for name in ("a", "b"))
    cosines = [
        ref.principal_cosines(numpy_of(X), numpy_of(Y)).max()
        for X, Y in ((one.P, two.P), (one.Q, two.Q), (one.P, one.Q))
    ]
    assert max(cosines) < 0.95


def test_random_bases_are_uniform_on_average() -> None:
    """The mean projector of many random r-dimensional spans is r/m times the identity."""
    mean = sum(ref.projector(numpy_of(random_basis((6, 6), 2, seed=seed).P)) for seed in range(600)) / 600
    np.testing.assert_allclose(mean, np.eye(6) / 3, atol=0.06)


# ----------------------------------------------------------------------------------------------------- signgrad


@pytest.mark.parametrize("coordinates", ["qr", "raw", "scaled_raw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_signgrads_initial_core_is_the_best_copy_of_one_sign_step(dtype: torch.dtype, coordinates: str) -> None:
    layer = drawn_layer()
    basis = signgrad_basis(layer.moments(dtype), 4, coordinates=coordinates)
    expected = -ref.truncated(np.sign(layer.reference().G), 4)
    found = numpy_of(basis.P) @ numpy_of(basis.initial_core) @ numpy_of(basis.Q).T
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("constructor", ["eva", "filora"])
def test_a_direction_a_thousandth_as_strong_as_the_first_still_counts(constructor: str) -> None:
    """Eigenvalues of second moments are squares: the rank is told by amplitudes."""
    strengths = torch.tensor([1.4e3, *[1.0] * 9])
    moments = LayerMoments(num_tokens=1, input_outer=strengths.square().diag(), error_outer=strengths.square().diag())
    W = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    basis = build_basis(constructor, LayerData("l", (10, 10), lambda: W, moments), BasisOptions(r=8))
    assert basis.effective_rank == 8
