"""The arithmetic of y = (W + s·P R Qᵀ) x + b: zero cores, dtypes, gradients, merging."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

from adapted import BATCHES, DATA_DRIVEN, EXAMPLES, adapted, cores_of, logits, train_at_random
from frozencore import CONSTRUCTORS, FrozenCoreConfig, calibrate
from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.calibration.collect import collect_moments
from frozencore.errors import ArtifactError, CalibrationError, ModelError
from frozencore.files.fingerprint import fingerprint_model
from frozencore.maths.basis import Basis
from references import numpy_of
from tiny import batch_of, tiny_gpt2, tiny_llama, tiny_qwen2

EVERY = pytest.mark.parametrize("constructor", CONSTRUCTORS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@EVERY
def test_zero_core_leaves_the_logits_bit_equal(constructor: str, dtype: torch.dtype) -> None:
    expected = logits(tiny_qwen2().to(dtype))
    model = adapted(constructor, dtype=dtype)
    assert any(bool(layer.frozencore_P["default"].any()) for layer in cores_of(model))
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model.train()), expected)
    assert logits(model).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY
def test_cores_are_float32_and_bases_are_in_the_models_dtype(constructor: str, dtype: torch.dtype) -> None:
    layers = cores_of(adapted(constructor, dtype=dtype, coordinates="qr"))
    assert len(layers) == 8
    for layer in layers:
        P, Q, R = layer.factors("default")
        assert (P.dtype, Q.dtype, R.dtype) == (dtype, dtype, torch.float32)
        assert P.shape == (layer.out_features, 3)
        assert Q.shape == (layer.in_features, 3)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for X in (P, Q):
            np.testing.assert_allclose(numpy_of(X).T @ numpy_of(X), np.eye(3), atol=tolerance)


@EVERY
def test_the_optimiser_sees_only_the_cores(constructor: str) -> None:
    model = adapted(constructor, dtype=torch.bfloat16, rank_pattern={"k_proj": 2}).train()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("frozencore_R" in name for name in trainable)
    assert sum(p.numel() for p in trainable.values()) == 2 * (3 * 9 + 4)
    optimiser = torch.optim.AdamW(trainable.values(), lr=1e-2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(**BATCHES[0]).loss.backward()
    optimiser.step()
    for state in optimiser.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(trainable)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("alpha", [None, 12.0])
@EVERY
def test_the_gradient_of_a_zero_core_is_the_projected_moment(constructor: str, alpha: float | None, side: str) -> None:
    """∇_R L = s PᵀGQ (paper, section 3.1), with G a mean over tokens and L a sum over examples."""
    model = adapted(constructor, alpha=alpha, dtype=torch.float64)
    batch = batch_of(EXAMPLES, side)
    names = [layer.name for layer in cores_of(model)]
    moments = collect_moments(tiny_qwen2().double(), [batch], names)
    model.train()
    for example in EXAMPLES:
        model(**batch_of([example])).loss.backward()
    scale = 1.0 if alpha is None else alpha / 3
    for layer in cores_of(model):
        P, Q, _ = (numpy_of(factor) for factor in layer.factors("default"))
        expected = scale * P.T @ numpy_of(moments[layer.name].cross) @ Q
        found = numpy_of(layer.frozencore_R["default"].weight.grad)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("alpha", [None, 1.5])
def test_a_trained_core_is_the_dense_update_of_its_weight(make: type, alpha: float | None) -> None:
    targets = ["c_attn", "c_proj"] if make is tiny_gpt2 else None
    model = adapted("rawgrad", model=make(), dtype=torch.float64, alpha=alpha, trained=True, target_modules=targets)
    dense = make().double()
    with torch.no_grad():
        for layer in cores_of(model):
            P, Q, R = layer.factors("default")
            update = (1.0 if alpha is None else alpha / 3) * P @ R @ Q.mT
            target = dense.get_submodule(layer.name)
            target.weight += update.mT if isinstance(target, Conv1D) else update
            torch.testing.assert_close(
                layer.get_delta_weight("default"), update.mT if isinstance(target, Conv1D) else update
            )
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_gpt2])
def test_merge_keeps_the_logits_and_unmerge_restores_the_weights(
    make: type, dtype: torch.dtype, tolerance: float
) -> None:
    targets = ["c_attn"] if make is tiny_gpt2 else None
    model = adapted("random", model=make(), dtype=dtype, trained=True, target_modules=targets)
    expected = logits(model)
    weights = [layer.get_base_layer().weight.clone() for layer in cores_of(model)]
    model.merge_adapter(safe_merge=True)
    assert all(
        not torch.equal(w, layer.get_base_layer().weight) for w, layer in zip(weights, cores_of(model), strict=True)
    )
    torch.testing.assert_close(logits(model), expected, rtol=tolerance, atol=tolerance)
    model.unmerge_adapter()
    for weight, layer in zip(weights, cores_of(model), strict=True):
        torch.testing.assert_close(layer.get_base_layer().weight, weight, rtol=0, atol=tolerance)
    plain = copy.deepcopy(model).merge_and_unload()
    assert not any("frozencore" in name for name in plain.state_dict())
    torch.testing.assert_close(logits(plain), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(logits(model.unload()), logits(make().to(dtype)))


def with_two_adapters(dtype: torch.dtype = torch.float32) -> PeftModel:
    model = adapted("random", dtype=dtype, trained=True)
    model.add_adapter("other", FrozenCoreConfig(r=2, alpha=5.0, constructor="random"))
    train_at_random(model, "other", seed=1)
    return model


def test_a_merge_of_one_adapter_leaves_the_other_out_and_a_second_unmerge_only_warns() -> None:
    layer = cores_of(with_two_adapters())[0]
    weight = layer.get_base_layer().weight
    before = weight.clone()
    layer.merge(adapter_names=["other"])
    assert layer.merged_adapters == ["other"]
    torch.testing.assert_close(weight, before + layer.get_delta_weight("other"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.unmerge()
    torch.testing.assert_close(weight, before)
    before = weight.clone()
    with pytest.warns(UserWarning, match=r"^Already unmerged. Nothing to do.$"):
        layer.unmerge()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_gpt2])
def test_unmerging_gives_the_same_bits_back_however_often(make: type, dtype: torch.dtype) -> None:
    targets = ["c_attn"] if make is tiny_gpt2 else None
    model = adapted("random", model=make(), dtype=dtype, trained=True, target_modules=targets)
    model.add_adapter("other", FrozenCoreConfig(r=2, alpha=5.0, constructor="random", target_modules=targets))
    train_at_random(model, "other", seed=1)
    before = fingerprint_model(model)
    for names in (["default"], ["other", "default"], ["other"]):
        model.merge_adapter(adapter_names=names)
        copied = copy.deepcopy(model)
        for merged in (copied, model):
            assert fingerprint_model(merged) != before
            merged.unmerge_adapter()
            assert fingerprint_model(merged) == before


def test_a_merged_weight_that_is_moved_or_cast_is_restored_and_one_that_is_changed_keeps_the_change() -> None:
    model = adapted("random", trained=True)
    layer = cores_of(model)[0]
    before = layer.get_base_layer().weight.detach().clone()
    model.merge_adapter()
    model.bfloat16().unmerge_adapter()
    assert torch.equal(layer.get_base_layer().weight, before.bfloat16())
    model = adapted("random", trained=True)
    model.merge_adapter()
    with torch.no_grad():
        cores_of(model)[0].get_base_layer().weight.add_(1.0)
    model.unmerge_adapter()
    torch.testing.assert_close(cores_of(model)[0].get_base_layer().weight, before + 1.0, rtol=0, atol=1e-5)


def test_a_base_that_is_changed_under_an_adapter_is_another_base(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    model.save_pretrained(str(tmp_path / "before"))
    model.merge_adapter()
    model.save_pretrained(str(tmp_path / "merged"))
    with torch.no_grad():
        cores_of(model)[0].get_base_layer().weight.mul_(1.1)
    model.unmerge_adapter()
    model.save_pretrained(str(tmp_path / "after"))
    for name in ("before", "merged"):
        PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / name))
        with pytest.raises(ArtifactError, match="another base model"):
            model.load_adapter(str(tmp_path / name), name)
    with pytest.raises(ArtifactError, match="another base model"):
        PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "after"))


def test_a_16_bit_weight_is_rounded_once_when_an_update_is_merged() -> None:
    layer = cores_of(adapted("random", dtype=torch.bfloat16, trained=True, alpha=None))[0]
    P, Q, R = (numpy_of(factor) for factor in layer.factors("default"))
    exact = numpy_of(layer.get_base_layer().weight) + P @ R @ Q.T
    layer.merge()
    merged = layer.get_base_layer().weight
    assert merged.dtype == torch.bfloat16
    np.testing.assert_allclose(numpy_of(merged), exact, rtol=2**-8, atol=1e-6)  # half a unit in the last of 8 bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_active_adapters_add_up_in_the_models_dtype(dtype: torch.dtype) -> None:
    model = with_two_adapters(dtype)
    layer = cores_of(model)[0]
    x = torch.randn(2, 5, layer.in_features, dtype=dtype)
    base = layer.get_base_layer()(x)
    model.base_model.set_adapter(["default", "other"])
    found = layer(x)
    assert found.dtype == dtype
    expected = numpy_of(base)
    for name, scale in (("default", 1.0), ("other", 2.5)):
        P, Q, R = (numpy_of(factor) for factor in layer.factors(name))
        expected = expected + scale * numpy_of(x) @ Q @ R.T @ P.T
    error = np.abs(numpy_of(found) - expected).max() / np.abs(expected).max()
    assert error < 8 * torch.finfo(dtype).eps


def test_the_dense_weight_is_outputs_by_inputs_in_either_layout() -> None:
    conv, linear = cores_of(adapted("random", model=tiny_gpt2(), target_modules=["c_attn"]))[0], cores_of(adapted())[0]
    assert torch.equal(conv.dense_weight(), conv.get_base_layer().weight.mT)
    assert torch.equal(linear.dense_weight(), linear.get_base_layer().weight)
    assert conv.dense_weight().shape == (conv.out_features, conv.in_features)


def test_moving_an_adapter_rounds_its_bases_but_not_its_core_and_leaves_one_without_storage_alone() -> None:
    layer = cores_of(adapted("random", dtype=torch.bfloat16, trained=True))[0]
    before = [factor.clone() for factor in layer.factors("default")]
    layer.frozencore_P["default"], layer.frozencore_Q["default"] = before[0].float(), before[1].float()
    layer._move_adapter_to_device_of_base_layer("default")
    for found, expected in zip(layer.factors("default"), before, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    layer._move_adapter_to_device_of_base_layer("default", torch.device("meta"))
    assert all(factor.is_meta for factor in layer.factors("default"))
    layer._move_adapter_to_device_of_base_layer("default")  # PEFT calls it before the weights are loaded
    assert all(factor.is_meta for factor in layer.factors("default"))


def test_a_safe_merge_refuses_a_core_that_is_not_finite() -> None:
    model = adapted("random")
    layer = cores_of(model)[0]
    before = layer.get_base_layer().weight.clone()
    with torch.no_grad():
        layer.frozencore_R["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.get_base_layer().weight, before)


@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_training_before_calibration_is_an_error_that_says_to_call_it(constructor: str) -> None:
    model = adapted(constructor, calibrated=False)
    assert torch.equal(logits(model), logits(tiny_qwen2()))  # evaluation is allowed
    model.train()
    with pytest.raises(CalibrationError, match=r"Call frozencore\.calibrate\(model, dataloader\) first") as caught:
        model(**BATCHES[0])
    assert "\n" not in str(caught.value)
    assert "layers.0.self_attn.q_proj" in str(caught.value)
    calibrate(model, BATCHES, progress=False)
    model(**BATCHES[0]).loss.backward()


@pytest.mark.parametrize("constructor", ["random", "vera", "lora_xs", "milora"])
def test_a_constructor_without_data_is_ready_at_once(constructor: str) -> None:
    model = adapted(constructor).train()
    model(**BATCHES[0]).loss.backward()
    assert all(bool(layer.frozencore_R["default"].weight.grad.any()) for layer in cores_of(model))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient_of_a_core(use_reentrant: bool) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = adapted("random", dtype=torch.float64).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model(**BATCHES[0]).loss.backward()
        gradients.append([layer.frozencore_R["default"].weight.grad for layer in cores_of(model)])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-8, atol=1e-12)


def mixtral() -> nn.Module:
    """Mixtral keeps its experts in one 3-D parameter."""
    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    return MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "target", "message"),
    [
        (tiny_qwen2, "embed_tokens", r"'model\.embed_tokens' is a Embedding"),
        (mixtral, "experts", r"'model\.layers\.0\.mlp\.experts' is a MixtralExperts.*fused experts"),
    ],
)
def test_a_target_that_is_not_linear_is_refused_in_one_line(
    make: Callable[[], nn.Module], target: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        get_peft_model(make(), FrozenCoreConfig(target_modules=[target], constructor="random"))
    assert "\n" not in str(caught.value)


def test_all_linear_targets_every_linear_layer_but_the_head() -> None:
    model = adapted("random", target_modules="all-linear")
    adapted_names = {layer.name for layer in cores_of(model)}
    base = tiny_qwen2()
    assert adapted_names == {
        name for name, module in base.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
    }
    model.add_adapter("second", FrozenCoreConfig(r=2, constructor="vera", target_modules="all-linear"))
    assert {layer.name for layer in cores_of(model, "second")} == adapted_names


def test_layers_narrower_than_the_rank_get_the_rank_that_fits_and_one_warning() -> None:
    """k and v have 16 outputs."""
    for constructor in ("random", "fcca"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = adapted(constructor, r=20)
        about_rank = [str(w.message) for w in caught if "narrower than the rank" in str(w.message)]
        assert len(about_rank) == 1, constructor
        assert "4 of 8 layers" in about_rank[0]
        assert "model.layers.0.self_attn.k_proj, 16 instead of 20" in about_rank[0]
        assert [layer.frozencore_R["default"].weight.shape[0] for layer in cores_of(model)][:4] == [20, 16, 16, 20]


def test_bf16_cores_keep_small_steps_that_bf16_would_lose() -> None:
    model = adapted("random", dtype=torch.bfloat16)
    train_at_random(model, size=1.0)
    R = cores_of(model)[0].frozencore_R["default"].weight
    before = R.detach().clone()
    with torch.no_grad():
        R += 1e-5
    assert bool((before != R).all())


def narrow_layer(num_inputs: int, num_outputs: int, rank: int) -> FrozenCoreLinear:
    """A layer with one adapter, called ``default``, that has no basis."""
    layer = FrozenCoreLinear(nn.Linear(num_inputs, num_outputs), "default", "only")
    layer.update_layer("default", rank, 2.0, inference_mode=False)
    return layer


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(3, 9), (9, 3)])
def test_an_added_core_has_the_rank_that_fits_trains_unless_for_inference_and_draws_nothing(
    num_inputs: int, num_outputs: int
) -> None:
    for inference_mode in (False, True):
        layer = FrozenCoreLinear(nn.Linear(num_inputs, num_outputs), "default", "only")
        before = torch.get_rng_state()
        layer.update_layer("default", 5, 2.0, inference_mode=inference_mode)
        assert torch.equal(torch.get_rng_state(), before)
        P, Q, R = layer.factors("default")
        assert (P.shape, Q.shape, R.shape) == ((num_outputs, 3), (num_inputs, 3), (3, 3))
        assert R.requires_grad is not inference_mode


def test_a_random_core_is_drawn_as_torch_draws_a_linear_layer() -> None:
    layer = narrow_layer(6, 5, rank=3)
    torch.manual_seed(7)
    expected = nn.Linear(3, 3, bias=False).weight
    torch.manual_seed(7)
    basis = Basis(P=torch.eye(5, 3), Q=torch.eye(6, 3), spectrum=torch.ones(3), effective_rank=3)
    layer.set_basis("default", basis, random_core=True)
    assert torch.equal(layer.factors("default")[2], expected)


def test_a_merged_layer_stays_merged_while_it_is_used_and_is_unmerged_once_it_is_disabled() -> None:
    layer = narrow_layer(6, 5, rank=3)
    layer.set_basis("default", Basis(torch.eye(5, 3), torch.eye(6, 3), torch.ones(3), 3), random_core=True)
    x = torch.randn(4, 6)
    plain, adapted_ = layer.base_layer(x), layer(x)
    layer.merge()
    torch.testing.assert_close(layer(x), adapted_)
    assert layer.merged
    layer.enable_adapters(False)
    torch.testing.assert_close(layer(x), plain)
    assert not layer.merged


@pytest.mark.parametrize(("weight", "bases"), [(torch.bfloat16, torch.bfloat16), (torch.float8_e4m3fn, torch.float32)])
def test_bases_take_the_dtype_of_their_own_weight_unless_it_is_too_narrow_to_compute_in(
    weight: torch.dtype, bases: torch.dtype
) -> None:
    layer = FrozenCoreLinear(nn.Linear(6, 5).to(weight), "default", "only", dtype=torch.float32)
    layer.update_layer("default", 3, 1.0, inference_mode=False)
    assert [X.dtype for X in layer.factors("default")] == [bases, bases, torch.float32]
