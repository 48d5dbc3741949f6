"""The Fisher metric: damping, sides, dense factors, shrinkage, and what it refuses."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import references as ref
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Sides, Whitening, damped_inverse_root
from references import numpy_of
from tiny import drawn_layer


def whitened(whitening: Whitening, moments: LayerMoments) -> np.ndarray:
    """T as the code under test makes it."""
    A_root, D_root = whitening.inverse_roots(moments)
    return numpy_of(A_root(D_root(moments.G).mT).mT)


@pytest.mark.parametrize("sides", get_args(Sides))
@pytest.mark.parametrize(("fisher", "shrinkage"), [("diagonal", 0.0), ("dense", 0.0), ("dense", 0.3)])
def test_whitening_equals_the_reference_metric(sides: str, fisher: str, shrinkage: float) -> None:
    layer = drawn_layer()
    e = layer.reference()
    A = ref.damped_matrix(e.A if fisher == "dense" else np.diag(e.A), 1e-2, shrinkage)
    D = ref.damped_matrix(e.D if fisher == "dense" else np.diag(e.D), 1e-1, shrinkage)
    A = A if sides in ("both", "input") else np.eye(len(A))
    D = D if sides in ("both", "output") else np.eye(len(D))
    whitening = Whitening(whiten=sides, fisher=fisher, shrinkage=shrinkage, damping=(1e-2, 1e-1))
    np.testing.assert_allclose(
        whitened(whitening, layer.moments()), ref.whitened(e.G, A, D), rtol=1e-8, atol=1e-10 * np.abs(e.G).max()
    )


@given(seed=st.integers(0, 10_000), num_tokens=st.integers(1, 30), spread=st.floats(0, 4))
def test_no_entry_of_t_exceeds_one_without_damping(seed: int, num_tokens: int, spread: float) -> None:
    """T_ij is an uncentred correlation: Cauchy-Schwarz."""
    layer = drawn_layer(m=6, n=5, num_tokens=num_tokens, seed=seed, spread=spread)
    T = whitened(Whitening(damping=1e-12), layer.moments())
    assert np.abs(T).max() <= 1 + 1e-9


@pytest.mark.parametrize("fisher", ["diagonal", "dense"])
def test_a_root_is_computed_in_float64_and_keeps_the_dtype_of_what_it_multiplies(fisher: str) -> None:
    """A float32 product of a root would be off by more than the rounding of its result."""
    moments = drawn_layer(spread=4).moments(torch.float32)
    root, _ = Whitening(fisher=fisher).inverse_roots(moments)
    X = torch.eye(10) if fisher == "diagonal" else moments.A
    assert root(X).dtype == torch.float32
    assert torch.equal(root(X), root(X.double()).float())


@pytest.mark.parametrize("zeros", [torch.zeros(4), torch.zeros(4, 4)])
def test_a_second_moment_of_zeros_is_refused(zeros: torch.Tensor) -> None:
    with pytest.raises(CalibrationError, match="zero in every coordinate"):
        damped_inverse_root(zeros, 1e-3)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"whiten": "left"}, "whiten must be one of both, input, output, none, but 'left' was given"),
        ({"fisher": "block"}, "fisher must be one of diagonal, dense, but 'block' was given"),
        ({"fisher": "dense", "shrinkage": 1.5}, "shrinkage must be a number from 0 to 1, but 1.5 was given"),
        ({"fisher": "dense", "shrinkage": float("nan")}, "shrinkage must be a number from 0 to 1"),
        ({"shrinkage": 0.5}, "needs fisher='dense'"),
        *(
            ({"damping": damping}, "damping must be a number above 0 or a list of 2")
            for damping in (0.0, -1e-3, float("inf"), float("nan"), (1e-3, 0.0))
        ),
        *(({"damping": damping}, "damping") for damping in ((1e-3,), (1e-3, 1e-3, 1e-3), "1e-3", None)),
        ({"fisher": "dense", "shrinkage": "much"}, "shrinkage"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Whitening(**options)


def test_rounding_below_the_damping_does_not_blow_up() -> None:
    """A dense moment of fewer tokens than inputs has zero eigenvalues; float32 sums put them beside zero."""
    X = torch.randn(20, 60, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 1, 60)
    A = (X.mT @ X / 20).float()
    assert torch.linalg.eigvalsh(A.double())[0] < 0
    for damping in (1e-3, 1e-9, 1e-12):
        epsilon = damping * float(A.double().diagonal().mean())
        root = damped_inverse_root(A, damping)(torch.eye(60, dtype=torch.float64))
        assert torch.linalg.matrix_norm(root, 2) <= epsilon**-0.5 * (1 + 1e-9)
