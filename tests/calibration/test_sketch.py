"""Streaming against the exact sums: on a layer whose cross moment is prescribed, and on tiny models."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adapted import BATCHES, adapted, cores_of
from frozencore import calibrate
from frozencore.adapter.bases.passes import BasisWork
from frozencore.calibration.budget import PassPlan
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.sketch import SketchTarget, stream_whitened_svds
from frozencore.constructors.fcca import fcca_basis, fcca_basis_of_svd
from frozencore.errors import CalibrationError
from frozencore.maths.linalg import principal_cosines
from frozencore.maths.moments import MOMENT_NAMES
from frozencore.maths.objective import captured_correlation
from frozencore.maths.whitening import Whitening, damped
from tiny import tiny_qwen2

SHAPE, RANK = (640, 560), 16


class Prescribed(nn.Module):
    """One layer that reads a row of ``inputs`` per token and whose output error there is the row of ``errors``."""

    def __init__(self, inputs: Tensor, errors: Tensor) -> None:
        super().__init__()
        self.inputs, self.errors = inputs, errors
        self.layer = nn.Linear(inputs.shape[1], errors.shape[1], bias=False)

    def forward(self, input_ids: Tensor, **_: Tensor) -> SimpleNamespace:
        loss = (self.layer(self.inputs[input_ids]) * self.errors[input_ids]).sum()
        return SimpleNamespace(loss=loss / len(input_ids))


def hard_model(exponent: float, *, outliers: bool) -> Prescribed:
    """``Σ δxᵀ`` has the singular values i^-exponent; outlier channels give whitening something to do."""
    rng = np.random.default_rng(0)
    U, V = (np.linalg.qr(rng.normal(size=(width, min(SHAPE))))[0] for width in SHAPE)
    share = np.arange(1, min(SHAPE) + 1) ** (-exponent / 2)
    errors, inputs = (torch.tensor((X * share).T, dtype=torch.float32) for X in (U, V))
    if outliers:
        inputs[:, ::40] *= 10
        errors[:, ::40] *= 5
    return Prescribed(inputs, errors)


def batches_of_all(model: Prescribed) -> list[dict[str, Tensor]]:
    ids = torch.arange(len(model.inputs)).reshape(8, 1, -1)
    return [{"input_ids": part, "labels": part} for part in ids]


@pytest.mark.parametrize(("exponent", "outliers"), [(0.3, False), (0.3, True), (1.0, True)])
@pytest.mark.parametrize("sides", ["both", "input", "output", "none"])
def test_a_sketch_finds_the_exact_basis_on_slowly_decaying_spectra(sides: str, exponent: float, outliers: bool) -> None:
    model, whitening = hard_model(exponent, outliers=outliers), Whitening(sides=sides)
    batches = batches_of_all(model)
    moments = collect_moments(model, batches, ["layer"], needs=frozenset({"cross", "input_square", "error_square"}))
    exact = fcca_basis(moments["layer"], RANK, whitening=whitening)
    found = stream_whitened_svds(
        model, batches, {"layer": SketchTarget(model.layer, SHAPE, RANK)}, whitening=whitening,
        options=CalibrationOptions(),
    )["layer"]  # fmt: skip
    basis = fcca_basis_of_svd(found.svd, found.diagonals, RANK, whitening=whitening)
    assert principal_cosines(basis.P, exact.P).mean() >= 0.97
    assert principal_cosines(basis.Q, exact.Q).mean() >= 0.97
    ones = [torch.ones(width) for width in SHAPE]
    D = damped(moments["layer"].d, 1e-3) if sides in ("both", "output") else ones[0]
    A = damped(moments["layer"].a, 1e-3) if sides in ("both", "input") else ones[1]
    of_exact, of_sketch = (captured_correlation(moments["layer"].G, A, D, b) for b in (exact, basis))
    assert of_sketch >= 0.99 * of_exact
    assert basis.orthonormality_error() < 1e-5
    torch.testing.assert_close(basis.spectrum, exact.spectrum, rtol=0.05, atol=0)


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan is one group of sketches: the layers of the tests are too small for a budget to ask for them."""
    monkeypatch.setattr(BasisWork, "plan", lambda work, *_: PassPlan((tuple(work.layers),), streaming=True))


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize(
    ("constructor", "options"),
    [("fcca", {}), ("fcca", {"whiten": "input"}), ("fcca", {"coordinates": "qr"}), ("rawgrad", {})],
)
def test_where_a_sketch_spans_the_layer_streaming_is_exact(constructor: str, options: dict) -> None:
    """Rank 4: 8r = 32 is the width of the layers."""
    streamed = adapted(constructor, r=4, **options)
    moments = collect_moments(
        tiny_qwen2(), BATCHES, [layer.name for layer in cores_of(streamed)], needs=frozenset(MOMENT_NAMES)
    )
    exact = adapted(constructor, r=4, calibrated=False, **options)
    calibrate(exact, moments=moments, progress=False)
    for one, other in zip(cores_of(exact), cores_of(streamed), strict=True):
        for X, Y in zip(one.factors("default")[:2], other.factors("default")[:2], strict=True):
            torch.testing.assert_close(X, Y, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("streaming")
def test_streaming_reports_four_passes_and_the_same_findings() -> None:
    seen: list[tuple[int, int | None]] = []
    model = adapted("fcca", calibrated=False)
    found = calibrate(
        model, BATCHES, progress=lambda stage, done, total: seen.append((done, total)) if stage != "bases" else None
    )
    assert seen == [(done, 32) for done in range(4, 33, 4)]
    exact = calibrate(adapted("fcca", calibrated=False), BATCHES, progress=False)
    assert found.layers.keys() == exact.layers.keys()
    for name, layer in found.layers.items():
        assert layer.num_tokens == exact.layers[name].num_tokens
        assert layer.input_spread == pytest.approx(exact.layers[name].input_spread, rel=1e-5)


@pytest.mark.usefixtures("streaming")
def test_a_layer_without_gradient_gets_a_seeded_basis_from_a_sketch_too() -> None:
    model = adapted("fcca", calibrated=False)
    with torch.no_grad():
        model.get_base_model().model.layers[1].self_attn.o_proj.weight.zero_()  # cuts q, k and v off
    with pytest.warns(UserWarning, match="received no signal"):
        found = calibrate(model, BATCHES, progress=False)
    dead = [name for name, layer in found.layers.items() if layer.effective_rank == 0]
    assert dead == [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]


def test_an_error_in_a_pass_names_layer_and_batch() -> None:
    model = hard_model(1.0, outliers=False)
    model.inputs[5, 3] = float("nan")
    with pytest.raises(CalibrationError, match=r"input of layer 'layer' in calibration batch 0"):
        stream_whitened_svds(
            model, batches_of_all(model), {"layer": SketchTarget(model.layer, SHAPE, RANK)},
            whitening=Whitening(), options=CalibrationOptions(),
        )  # fmt: skip
