"""Folders of adapters: read, summed, packed beside their basis; and the numbers of ``inspect`` against theory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from frozencore import fcca_basis, load_basis, merge_adapters, pack_adapter, rawgrad_basis, save_basis, unpack_adapter
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.report import LayerReport, report_basis, with_angles, with_capture
from frozencore.adapter.saved.tensors import Factors, factors_alone
from frozencore.errors import ArtifactError
from frozencore.maths.basis import LayerBasis
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening
from tiny import adapted, cores_of, drawn_layer, logits, on_one_basis, tiny_qwen2, train_at_random

WEIGHTS_FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAMES, WEIGHTS = ["a", "b", "d"], [0.5, 0.75, -0.25]


def with_three(tmp_path: Path, *, named: bool = True) -> PeftModel:
    """Three adapters on one basis, saved too."""
    model = on_one_basis(*NAMES, place=tmp_path / "basis" if named else None, alpha=6.0)
    model.save_pretrained(str(tmp_path / "out"))
    return model


def deltas(model: PeftModel, name: str) -> list[Tensor]:
    return [layer.get_delta_weight(name).detach().double() for layer in cores_of(model, name)]


def weighted(model: PeftModel, _: Path, weights: list[float]) -> str:
    model.add_weighted_adapter(NAMES, weights, "sum", combination_type="linear")
    assert cores_of(model, "sum")[0].frozencore_P["sum"] is cores_of(model, "sum")[0].frozencore_P["a"]
    return "sum"


def by_folders(model: PeftModel, tmp_path: Path, weights: list[float]) -> str:
    folders = [tmp_path / "out" / name for name in NAMES]
    merge_adapters(folders, tmp_path / "out" / "sum", weights=None if weights == [1 / 3] * 3 else weights)
    model.load_adapter(str(tmp_path / "out" / "sum"), "sum")
    return "sum"


def by_state_dicts(model: PeftModel, _: Path, weights: list[float]) -> str:
    states = [get_peft_model_state_dict(model, adapter_name=name) for name in NAMES]
    average = {key: sum(w * state[key] for w, state in zip(weights, states, strict=True)) for key in states[0]}
    set_peft_model_state_dict(model, average, adapter_name="b")
    return "b"


@pytest.mark.parametrize("weights", [WEIGHTS, [1 / 3] * 3], ids=["weights", "mean"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("way", [weighted, by_folders, by_state_dicts])
def test_a_sum_of_cores_on_one_basis_is_the_sum_of_their_updates(
    way: Callable[[PeftModel, Path, list[float]], str], named: bool, weights: list[float], tmp_path: Path
) -> None:
    model = with_three(tmp_path, named=named)
    before, updates = logits(model), [deltas(model, name) for name in NAMES]
    found = deltas(model, way(model, tmp_path, weights))
    for own, *each in zip(found, *updates, strict=True):
        expected = sum(w * delta for w, delta in zip(weights, each, strict=True))
        assert float((own - expected).abs().max()) < 1e-6 * float(expected.abs().max())
    assert torch.equal(logits(model), before)  # the sum is there, not active


def test_the_command_writes_the_sum(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with_three(tmp_path)
    folders = [tmp_path / "out" / name for name in NAMES]
    status, out, err = command("merge", *folders, "--weights=0.5,0.75,-0.25", "--output", tmp_path / "sum")
    assert status == 0, err
    assert "bytes" in out
    merge_adapters(folders, tmp_path / "same", weights=WEIGHTS)
    assert (tmp_path / "sum" / WEIGHTS_FILE).read_bytes() == (tmp_path / "same" / WEIGHTS_FILE).read_bytes()


# ---------------------------------------------------------------------------------------------- reading, packing


def test_a_folder_holds_the_factors_of_the_model_beside_a_basis_too(tmp_path: Path) -> None:
    model = adapted("fcca", dtype=torch.bfloat16, trained=True)
    model.save_pretrained(str(tmp_path / "whole"))
    tensors = load_file(tmp_path / "whole" / WEIGHTS_FILE)
    assert len(factors_alone(tensors)) == 3 * 8
    save_basis(model, tmp_path / "basis")
    model.save_pretrained(str(tmp_path / "cores"))
    for config, factors in (read_adapter(tmp_path / name) for name in ("whole", "cores")):
        assert (config.r, config.constructor, config.coordinates) == (3, "fcca", "qr")
        for layer in cores_of(model):
            own, held = factors[layer.name], layer.factors("default")
            saved = [tensors[f"base_model.model.{layer.name}.frozencore_{key}"] for key in ("P", "Q", "R.weight")]
            for X, Y, Z in zip((own.P, own.Q, own.R), held, saved, strict=True):
                assert X.dtype == Y.dtype == Z.dtype
                assert torch.equal(X, Y)
                assert torch.equal(Z, Y)


@pytest.mark.parametrize("with_basis", [True, False])
def test_packed_and_unpacked_is_the_same_folder_and_packed_ones_share_a_basis(with_basis: bool, tmp_path: Path) -> None:
    model = adapted("fcca")
    for seed, name in enumerate(("anna", "ben")):
        train_at_random(model, seed=seed)
        model.save_pretrained(str(tmp_path / name))
    identity = save_basis(model, tmp_path / "by hand")
    model.save_pretrained(str(tmp_path / "saved"))
    for name in ("anna", "ben"):
        pack_adapter(tmp_path / name, tmp_path / "by hand" if with_basis else None, tmp_path / "shared" / name)
        unpack_adapter(tmp_path / "shared" / name, tmp_path / f"{name}-again")
        for file in (WEIGHTS_FILE, CONFIG):
            assert (tmp_path / f"{name}-again" / file).read_bytes() == (tmp_path / name / file).read_bytes()
    packed = tmp_path / "shared" / "ben"
    assert (packed / WEIGHTS_FILE).read_bytes() == (tmp_path / "saved" / WEIGHTS_FILE).read_bytes()
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_qwen2(), str(packed)).eval()), logits(model))
    if not with_basis:  # the first one wrote it
        assert load_basis(tmp_path / "shared" / "basis").identity == identity
        adapted("rawgrad", trained=True).save_pretrained(str(tmp_path / "other"))
        with pytest.raises(ArtifactError, match="not those of"):
            pack_adapter(tmp_path / "other", None, tmp_path / "shared" / "other")


def test_cores_in_16_bits_are_rounded_once_and_multiply_in_float32(tmp_path: Path) -> None:
    model = adapted("fcca", trained=True)
    model.save_pretrained(str(tmp_path / "whole"))
    pack_adapter(tmp_path / "whole", None, tmp_path / "half", dtype=torch.bfloat16)
    key = f"frozencore_cores_{load_basis(tmp_path / 'basis').identity[:32]}"
    assert load_file(tmp_path / "half" / WEIGHTS_FILE)[key].dtype == torch.bfloat16
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "half"))
    for layer, other in zip(cores_of(loaded), cores_of(model), strict=True):
        assert layer.core("default").dtype == torch.float32
        assert torch.equal(layer.core("default"), other.core("default").bfloat16().float())


# ----------------------------------------------------------------------------------------------------- inspection

MOMENTS = drawn_layer(12, 20).moments(torch.float32)


def on(P: Tensor, Q: Tensor) -> Factors:
    return Factors(P, Q, torch.zeros(P.shape[1], P.shape[1]), scale=1.0)


def captured(basis: LayerBasis, moments: LayerMoments = MOMENTS) -> LayerReport:
    own = on(basis.P, basis.Q)
    return with_capture(report_basis(own), own, moments, Whitening(damping=1e-3))


def angles(one: Factors, other: Factors) -> LayerReport:
    return with_angles(report_basis(one), one, other)


def test_rawgrad_holds_the_most_gradient_and_fcca_all_that_its_rank_can() -> None:
    raw, own = rawgrad_basis(MOMENTS, 4), fcca_basis(MOMENTS, 4)
    best = captured(raw)
    largest = torch.linalg.svdvals(MOMENTS.G.double())[:4].square().sum().sqrt()
    assert best.gradient_norm == pytest.approx(float(largest), rel=1e-5)
    assert best.gradient_share < 1
    found = captured(own)
    assert found.correlation_share == pytest.approx(1, abs=1e-5)
    assert found.correlation == pytest.approx(sum(s**2 for s in found.singular_values), rel=1e-5)


def test_a_basis_on_single_coordinates_is_fully_coherent() -> None:
    report = report_basis(on(torch.eye(12)[:, :4], torch.eye(20)[:, :4]))
    assert (report.output_coherence, report.input_coherence) == (pytest.approx(3), pytest.approx(5))
    assert (report.num_values, report.basis_bytes, report.core_norm) == (16, 4 * 4 * 32, 0)


def test_angles_are_one_to_itself_in_other_coordinates_and_zero_to_the_complement() -> None:
    basis, eye = fcca_basis(MOMENTS, 4), torch.eye(12)
    own = on(basis.P, basis.Q)
    assert angles(own, on(basis.P @ torch.randn(4, 4), basis.Q)).output_cosine == pytest.approx(1)
    found = angles(on(eye[:, :4], basis.Q), on(eye[:, 4:8], basis.Q))
    assert found.output_cosine == pytest.approx(0, abs=1e-6)


def test_a_layer_without_gradient_is_reported_and_not_an_error() -> None:
    zero = replace(MOMENTS, cross=torch.zeros(12, 20), error_square=torch.zeros(12))
    report = captured(fcca_basis(MOMENTS, 4), zero)
    assert (report.gradient_norm, report.correlation_share, report.effective_rank) == (0, 0, 0)
