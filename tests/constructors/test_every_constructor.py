"""Properties of every constructor: reference spans, orthonormality, determinism, edges, errors."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import get_args

import numpy as np
import pytest
import torch

import references as ref
from frozencore.constructors import (
    CONSTRUCTORS,
    BasisOptions,
    EvaOptions,
    FCCAOptions,
    FiLoRAOptions,
    LayerData,
    build_basis,
    find_constructor,
)
from frozencore.constructors.eva import EvaOutput
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.basis import Coordinates, LayerBasis
from frozencore.maths.linalg import SvdMethod, truncated_svd
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.maths.whitening import Fisher, Sides
from frozencore.options import options_of
from references import numpy_of
from tiny import drawn_layer, layer_of_rank

READS_DATA = ("fcca", "rawgrad", "signgrad", "filora", "eva")
READS_GRADIENT = ("fcca", "rawgrad", "signgrad", "filora")
EVERY = pytest.mark.parametrize("constructor", CONSTRUCTORS)


@pytest.mark.parametrize("shape", [(12, 10), (9, 14), (11, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constructor", ref.REFERENCE_FACTORS)
def test_spans_equal_the_reference(constructor: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    layer = drawn_layer(*shape, seed=1)
    P0, Q0 = ref.REFERENCE_FACTORS[constructor](layer.reference(), 4)
    basis = build_basis(constructor, layer.evidence(dtype), BasisOptions(r=4))
    tolerance = 1e-6 if dtype == torch.float64 else 1e-4
    assert ref.span_distance(numpy_of(basis.P), P0) < tolerance
    assert ref.span_distance(numpy_of(basis.Q), Q0) < tolerance


def in_fisher(X: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Orthonormal in the metric of a diagonal second moment, in units of its mean."""
    X = WRITTEN_IN["qr"](X)
    return X @ ref.power(X.T @ (second[:, None] / second.mean() * X), -0.5)


WRITTEN_IN = {
    "raw": lambda X: X,
    "scaled_raw": lambda X: X * (X.shape[1] ** 0.5 / np.linalg.norm(X)),
    "qr": lambda X: X @ np.linalg.inv(np.linalg.cholesky(X.T @ X).T),
}


@pytest.mark.parametrize("coordinates", get_args(Coordinates))
@EVERY
def test_every_constructor_writes_its_raw_factors_in_the_chosen_coordinates(constructor: str, coordinates: str) -> None:
    layer = drawn_layer().evidence()
    raw = build_basis(constructor, layer, BasisOptions(r=4, coordinates="raw"))
    found = build_basis(constructor, layer, BasisOptions(r=4, coordinates=coordinates))
    measured = {"P": constructor in READS_GRADIENT, "Q": constructor in READS_DATA}
    for side, X, X0, second in (("P", found.P, raw.P, layer.data.d), ("Q", found.Q, raw.Q, layer.data.a)):
        if coordinates == "fisher" and measured[side]:
            expected = in_fisher(numpy_of(X0), numpy_of(second))
        else:
            expected = WRITTEN_IN["qr" if coordinates == "fisher" else coordinates](numpy_of(X0))
        np.testing.assert_allclose(numpy_of(X), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("method", ["gram", "randomized", "full"])
@pytest.mark.parametrize("constructor", ["fcca", "rawgrad", "signgrad", "lora_xs"])
def test_the_chosen_svd_runs_under_the_layers_own_seed(constructor: str, method: SvdMethod) -> None:
    """To the bit, so that neither another method nor another seed passes for it."""
    layer = drawn_layer(300, 280).evidence(torch.float32)
    own = {"whiten": "none"} if constructor == "fcca" else {}
    options = CONSTRUCTORS[constructor].options(
        r=4, coordinates="raw", svd_method=method, seed=0, **own
    )  # the seed of directions of the weight is 0 under every seed
    M = {"signgrad": layer.data.G.sign(), "lora_xs": layer.weight()}.get(constructor, layer.data.G)
    expected = truncated_svd(M, 4, method=method, seed=layer.seed(0))
    assert torch.equal(build_basis(constructor, layer, options).Q, expected.V)


@pytest.mark.parametrize(
    ("shape", "rank"), [((12, 10), 4), ((12, 10), 1), *((s, 8) for s in ((3, 10), (10, 3), (1, 6)))]
)
@EVERY
def test_a_basis_is_float32_orthonormal_of_the_rank_that_fits_and_its_spectrum_falls(
    constructor: str, shape: tuple[int, int], rank: int
) -> None:
    basis = build_basis(constructor, drawn_layer(*shape).evidence(), BasisOptions(r=rank, coordinates="qr"))
    assert basis.P.dtype == basis.Q.dtype == torch.float32
    assert [basis.P.shape, basis.Q.shape] == [(width, min(rank, *shape)) for width in shape]
    assert basis.orthonormality_error() < 1e-6
    assert basis.effective_rank == basis.rank or shape != (12, 10)  # the signs of a few rows may be equal
    assert bool((basis.spectrum[:-1] >= basis.spectrum[1:]).all())
    assert bool((basis.spectrum >= 0).all())


@pytest.mark.usefixtures("as_a_user")  # beartype draws from Python's RNG
@EVERY
def test_the_same_seed_gives_the_same_bytes_and_leaves_every_rng_alone(constructor: str) -> None:
    layer, options = drawn_layer(40, 30).evidence(torch.float32), BasisOptions(r=6, svd_method="randomized", seed=9)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    first = build_basis(constructor, layer, options)
    torch.rand(7)  # another place in the global stream
    torch.set_rng_state(states[2])
    second = build_basis(constructor, layer, options)
    assert first.P.numpy().tobytes() == second.P.numpy().tobytes()
    assert first.Q.numpy().tobytes() == second.Q.numpy().tobytes()
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("method", ["auto", "randomized"])
@EVERY
def test_a_default_device_of_torch_is_not_that_of_seeded_draws(constructor: str, method: SvdMethod) -> None:
    layer, options = layer_of_rank(4, 40, 30).evidence(torch.float32), BasisOptions(r=6, svd_method=method)
    expected = build_basis(constructor, layer, options)
    with torch.device("meta"):
        basis = build_basis(constructor, layer, options)
    assert torch.equal(basis.P, expected.P)
    assert torch.equal(basis.Q, expected.Q)


@EVERY
def test_only_random_bases_depend_on_the_seed(constructor: str) -> None:
    layer = drawn_layer().evidence()
    one, two = (build_basis(constructor, layer, BasisOptions(r=4, seed=seed)) for seed in (1, 2))
    assert torch.equal(one.P, two.P) == (constructor not in ("random", "vera"))


@EVERY
def test_weights_alone_decide_a_basis_whose_row_says_so(constructor: str) -> None:
    one, other = drawn_layer(seed=1), drawn_layer(seed=2)
    of_the_same_weight = dataclasses.replace(other, W=one.W)
    found = [
        build_basis(constructor, layer.evidence(), BasisOptions(r=4, seed=seed))
        for layer, seed in ((one, 1), (of_the_same_weight, 2))
    ]
    assert torch.equal(found[0].P, found[1].P) == CONSTRUCTORS[constructor].weights_only


@EVERY
def test_a_core_to_start_from_comes_from_the_constructors_that_are_told_its_size(constructor: str) -> None:
    row = CONSTRUCTORS[constructor]
    reads = "initial_step" in options_of(row.options)
    basis = build_basis(constructor, drawn_layer().evidence(), BasisOptions(r=4))
    told, silent = row.options(r=4, **({"initial_step": 0.5} if reads else {})), row.options(r=4)
    assert row.start_core(basis, silent, 2.0) is None
    start = row.start_core(basis, told, 2.0)
    assert (start is not None) == reads
    if start is not None and basis.initial_core is not None:
        torch.testing.assert_close(start, basis.initial_core / 4)


@pytest.mark.parametrize("constructor", ref.REFERENCE_FACTORS)
def test_signs_do_not_depend_on_the_sign_of_the_errors_or_of_the_svd(constructor: str) -> None:
    """δ → -δ turns G around: P keeps its canonical signs, and Q turns at most by whole columns."""
    layer = drawn_layer()
    turned = dataclasses.replace(layer, E=-layer.E)
    one = build_basis(constructor, layer.evidence(), BasisOptions(r=4))
    two = build_basis(constructor, turned.evidence(), BasisOptions(r=4))
    torch.testing.assert_close(one.P, two.P, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.Q.abs(), two.Q.abs(), atol=1e-5, rtol=0)


@EVERY
def test_bases_ignore_loss_scale_and_sums_against_means(constructor: str) -> None:
    layer, options = drawn_layer(), BasisOptions(r=4)
    expected = build_basis(constructor, layer.evidence(), options)
    louder = dataclasses.replace(layer, E=4096.0 * layer.E).evidence()
    evidence = layer.evidence()
    sums = dataclasses.replace(evidence, moments=dataclasses.replace(evidence.moments, num_tokens=1))
    for other in (louder, sums):
        found = build_basis(constructor, other, options)
        torch.testing.assert_close(found.P, expected.P, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.Q, expected.Q, atol=1e-5, rtol=0)


@pytest.mark.parametrize("coordinates", get_args(Coordinates))
@EVERY
def test_a_rank_deficient_layer_is_completed_with_orthonormal_directions(constructor: str, coordinates: str) -> None:
    layer = layer_of_rank(2)
    basis = build_basis(constructor, layer.evidence(), BasisOptions(r=5, coordinates=coordinates))
    assert basis.P.shape == (12, 5)
    assert basis.Q.shape == (10, 5)
    assert np.linalg.matrix_rank(numpy_of(basis.P), tol=1e-6 * np.linalg.norm(basis.P, 2)) == 5
    assert np.linalg.matrix_rank(numpy_of(basis.Q), tol=1e-6 * np.linalg.norm(basis.Q, 2)) == 5
    if coordinates == "qr":
        assert basis.orthonormality_error() < 1e-6
    if constructor in ("fcca", "rawgrad", "filora", "eva", "lora_xs"):
        assert basis.effective_rank == 2
        if coordinates == "fisher":  # which mixes them with the directions that complete them
            return
        P0, Q0 = ref.REFERENCE_FACTORS[constructor](layer.reference(), 2)
        assert ref.span_distance(numpy_of(basis.P)[:, :2], P0) < 1e-5
        assert ref.span_distance(numpy_of(basis.Q)[:, :2], Q0) < 1e-5


@pytest.mark.parametrize("constructor", READS_GRADIENT)
def test_a_layer_without_gradient_gets_a_seeded_basis_of_effective_rank_zero(constructor: str) -> None:
    layer = drawn_layer()
    silent = dataclasses.replace(layer, E=0 * layer.E).evidence()
    options = BasisOptions(r=4, coordinates="qr")
    basis = build_basis(constructor, silent, options)
    assert basis.effective_rank == 0
    assert basis.orthonormality_error() < 1e-6
    other = build_basis(constructor, dataclasses.replace(silent, name="layer.1"), options)
    assert not torch.allclose(basis.P, other.P)


@pytest.mark.parametrize("constructor", ["fcca", "rawgrad", "filora", "eva", "lora_xs"])
def test_completions_are_a_layers_own_and_follow_the_seed_where_the_data_decides(constructor: str) -> None:
    evidence, options = layer_of_rank(2).evidence, BasisOptions(r=5, seed=1, coordinates="qr")
    basis = build_basis(constructor, evidence(name="layer.0"), options)
    elsewhere = build_basis(constructor, evidence(name="layer.1"), options)
    reseeded = build_basis(constructor, evidence(name="layer.0"), dataclasses.replace(options, seed=2))
    for X, Y, Z in ((basis.P, elsewhere.P, reseeded.P), (basis.Q, elsewhere.Q, reseeded.Q)):
        assert torch.equal(X[:, :2], Y[:, :2])
        assert not torch.allclose(X[:, 2:], Y[:, 2:])
        assert torch.equal(X, Z) == (constructor == "lora_xs")


@EVERY
def test_equal_singular_values_give_a_valid_deterministic_basis(constructor: str) -> None:
    """Every direction of an orthogonal G, W, A and D is as good as any other."""
    eye = torch.eye(8)
    names = ("cross", "input_outer", "error_outer")
    moments = LayerMoments(8, input_square=torch.ones(8), error_square=torch.ones(8), **dict.fromkeys(names, eye))
    layer = LayerData("layer", (8, 8), lambda: eye, moments)
    first, second = (build_basis(constructor, layer, BasisOptions(r=3)) for _ in range(2))
    assert first.orthonormality_error() < 1e-6
    assert torch.equal(first.P, second.P)
    assert torch.equal(first.Q, second.Q)
    if constructor in ("fcca", "rawgrad", "signgrad"):
        assert float((first.P.mT @ eye @ first.Q).norm()) == pytest.approx(3**0.5, rel=1e-5)


@pytest.mark.parametrize("constructor", READS_DATA)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_moments_that_are_not_finite_are_refused_by_layer_and_moment(constructor: str, bad: float) -> None:
    layer = drawn_layer().evidence()
    needed = sorted(CONSTRUCTORS[constructor].needs(CONSTRUCTORS[constructor].options()))
    for name in needed:
        broken = getattr(layer.moments, name).clone()
        broken.view(-1)[3] = bad
        evidence = dataclasses.replace(layer, moments=dataclasses.replace(layer.moments, **{name: broken}))
        with pytest.raises(CalibrationError, match=rf"Layer 'layer\.0'.*{name!r} has NaN or Inf"):
            build_basis(constructor, evidence, BasisOptions(r=3))


@pytest.mark.parametrize("constructor", ["eva", "lora_xs", "milora"])
def test_a_weight_that_is_not_finite_is_refused_by_layer(constructor: str) -> None:
    layer = drawn_layer()
    layer.W[2, 3] = np.nan
    with pytest.raises(CalibrationError, match=r"layer\.0.*NaN or Inf"):
        build_basis(constructor, layer.evidence(), BasisOptions(r=3))


VARIANTS = [
    *((constructor, CONSTRUCTORS[constructor].options(r=3)) for constructor in READS_DATA),
    *(
        ("fcca", FCCAOptions(r=3, whiten=sides, fisher=fisher))
        for sides in get_args(Sides)
        for fisher in get_args(Fisher)
    ),
    ("filora", FiLoRAOptions(r=3, filora_fisher="diagonal")),
    *(
        ("eva", EvaOptions(r=3, eva_center=center, eva_output=output))
        for center in (False, True)
        for output in get_args(EvaOutput)
    ),
]


@pytest.mark.parametrize(("constructor", "options"), VARIANTS)
def test_the_needed_moments_are_read_all_of_them_and_no_others(constructor: str, options: BasisOptions) -> None:
    layer = drawn_layer().evidence()

    def basis_from(names: frozenset[MomentName]) -> LayerBasis:
        only = LayerMoments(layer.data.num_tokens, **{name: getattr(layer.data, name) for name in names})
        return build_basis(constructor, dataclasses.replace(layer, moments=only), options)

    needed = CONSTRUCTORS[constructor].needs(options)
    found, expected = basis_from(needed), build_basis(constructor, layer, options)
    assert torch.equal(found.P, expected.P)
    assert torch.equal(found.Q, expected.Q)
    for name in needed:
        with pytest.raises(CalibrationError, match=rf"Layer 'layer\.0'.*{name!r} is needed here but was not collected"):
            basis_from(needed - {name})


@pytest.mark.parametrize("constructor", READS_DATA)
def test_a_missing_calibration_is_said_with_the_way_out(constructor: str) -> None:
    layer = dataclasses.replace(drawn_layer().evidence(), moments=None)
    way_out = r"Layer .layer\.0.: This constructor needs .* Call frozencore.calibrate\(model, dataloader\)"
    with pytest.raises(CalibrationError, match=way_out) as caught:
        build_basis(constructor, layer, BasisOptions())
    assert str(caught.value).count("layer.0") == 1


@pytest.mark.parametrize(("name", "hint"), [("fca", "fcca"), ("lora-xs", "lora_xs"), ("raw_grad", "rawgrad")])
def test_an_unknown_constructor_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"no constructor {name!r}. Did you mean {hint!r}"):
        find_constructor(name)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    "options",
    [
        {"r": 0}, {"r": -1}, {"r": 2.0}, {"r": True}, {"r": "16"}, {"coordinates": "lu"},
        {"svd_method": "fast"}, {"filora_fisher": "block"}, {"eva_output": "nothing"}, {"eva_center": 1},
        {"initial_step": float("nan")}, {"whiten": "left"}, {"damping": (1e-3,)},
        {"damping": (1e-3, -1.0)}, {"shrinkage": 2},
    ],
)  # fmt: skip
def test_bad_options_are_refused_in_one_line_that_says_what_came(options: dict) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=rf"\b{name} must be .*{re.escape(repr(value))} was given"):
        next(row for row in CONSTRUCTORS.values() if name in options_of(row.options)).options(**options)
