"""Quantised base models on CPU: calibration, training, evaluation and reloading see one base and change none of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.quantization_utils import ForwardOnlyQuantizationBackend
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from fixtures import few
from frozencore import CONSTRUCTORS, FrozenCoreConfig, calibrate, export_lora, export_merged
from frozencore.calibration.collect import collect_moments
from frozencore.errors import ModelError
from frozencore.files.fingerprint import fingerprint_model
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train as train_by_recipe
from references import numpy_of, reference_moments
from tiny import (
    BATCHES,
    EXAMPLES,
    adapted,
    all_equal,
    attention_names,
    cores_of,
    draw_examples,
    factors_of,
    logits,
    tiny_qwen2,
    train_at_random,
)

bitsandbytes = pytest.importorskip("bitsandbytes")
torchao = pytest.importorskip("torchao")

from bitsandbytes.functional import has_avx512bf16  # noqa: E402
from torchao.quantization import (  # noqa: E402
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
)


@dataclass(frozen=True)
class Quantiser:
    """A way to quantise a base model, the dtype of its layers' computation, and its weights without its own code."""

    config: BitsAndBytesConfig | TorchAoConfig
    dtype: torch.dtype
    dequantised: Callable[[nn.Module], Tensor]


def nf4(compute: torch.dtype, **options: object) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute, **options)


def of_int8(layer: nn.Module) -> Tensor:
    scale = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    return layer.weight.data.double() * scale.double()[:, None] / 127


def of_nf4(layer: nn.Module) -> Tensor:
    """Two codes in a byte, the first in its upper half; one scale for 64 values, itself in 8 bits if nested."""
    state = layer.weight.quant_state
    scale = state.absmax.double()
    if state.nested:
        outer = state.state2.absmax.double().repeat_interleave(256)[: len(scale)]
        scale = state.state2.code.double()[state.absmax.long()] * outer + float(state.offset)
    packed = layer.weight.data.view(torch.uint8).flatten()
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()
    values = state.code.double()[codes.long()].view(-1, 64) * scale[:, None]
    return values.reshape(state.shape)


def of_torchao(layer: nn.Module) -> Tensor:
    codes, scale = layer.weight.qdata.double(), layer.weight.scale.double()
    return (codes.view(*scale.shape, -1) * scale[..., None]).reshape(codes.shape)


NESTED_IN_BF16 = nf4(torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16, bnb_4bit_use_double_quant=True)
QUANTISERS = {
    "int8": Quantiser(BitsAndBytesConfig(load_in_8bit=True), torch.float32, of_int8),
    "int8-bf16": Quantiser(BitsAndBytesConfig(load_in_8bit=True), torch.bfloat16, of_int8),
    "nf4": Quantiser(nf4(torch.float32), torch.float32, of_nf4),
    "nf4-bf16": Quantiser(NESTED_IN_BF16, torch.bfloat16, of_nf4),
    "torchao-int8": Quantiser(TorchAoConfig(Int8WeightOnlyConfig()), torch.float32, of_torchao),
    "torchao-int4": Quantiser(
        TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))),
        torch.float32,
        of_torchao,
    ),
}  # fmt: skip
EVERY_QUANTISER = pytest.mark.parametrize("quantiser", few(QUANTISERS, "int8", "nf4-bf16", "torchao-int8"))
NAMES = attention_names(tiny_qwen2())


def dense() -> nn.Module:
    """Wide enough for blocks of 64 in four bits."""
    return tiny_qwen2(hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    dense().save_pretrained(folder)
    return folder


def load(folder: Path, quantiser: str) -> nn.Module:
    how = QUANTISERS[quantiser]
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=copy.deepcopy(how.config), dtype=how.dtype)


def dequantised_model(folder: Path, quantiser: str) -> nn.Module:
    """The plain float64 model whose weights are those of the quantised one."""
    plain, base = dense().double(), load(folder, quantiser)
    for name, parameter in plain.named_parameters():
        layer = base.get_submodule(name.rpartition(".")[0])
        quantised = name.endswith("_proj.weight")
        parameter.data = QUANTISERS[quantiser].dequantised(layer) if quantised else base.get_parameter(name).double()
    return plain


@pytest.mark.parametrize(  # one that reads both sides, one that reads inputs, one that reads none
    "constructor",
    [
        pytest.param(name, marks=[] if name in ("fcca", "eva", "milora") else [pytest.mark.slow])
        for name in CONSTRUCTORS
    ],
)
@EVERY_QUANTISER
def test_every_constructor_leaves_a_quantised_base_and_its_outputs_as_they_were(
    folder: Path, quantiser: str, constructor: str
) -> None:
    base = load(folder, quantiser)
    before = fingerprint_model(base)
    model = adapted(constructor, model=base, dtype=None)
    assert fingerprint_model(model) == before
    with model.disable_adapter():
        expected = logits(model)
    assert torch.equal(logits(model), expected)
    assert fingerprint_model(model) == before  # evaluation does not change it either
    dtype = QUANTISERS[quantiser].dtype
    for layer in cores_of(model):
        P, Q, R = layer.factors("default")
        assert (P.dtype, Q.dtype, R.dtype) == (dtype, dtype, torch.float32)
        assert bool(P.any())
        assert bool(Q.any())


@EVERY_QUANTISER
def test_a_fingerprint_tells_quantised_bases_apart(folder: Path, quantiser: str) -> None:
    base = load(folder, quantiser)
    before = fingerprint_model(base)
    assert fingerprint_model(load(folder, quantiser)) == before
    assert fingerprint_model(dense().to(QUANTISERS[quantiser].dtype)) != before
    weight = base.model.layers[0].mlp.up_proj.weight
    codes = weight.qdata if hasattr(weight, "qdata") else weight.data
    codes.view(torch.uint8)[0, 0] ^= 1
    assert fingerprint_model(base) != before


@EVERY_QUANTISER
def test_moments_of_a_quantised_base_are_those_of_its_dequantised_weights(folder: Path, quantiser: str) -> None:
    """G, a and d against float64, one token at a time, relative: 1e-5 in float32; 1e-1 in bfloat16, where the plain
    model with the same weights is off by up to 7e-2."""
    expected = reference_moments(
        dequantised_model(folder, quantiser), [(list(e.ids), e.num_prompt) for e in EXAMPLES], NAMES
    )
    found = collect_moments(load(folder, quantiser), BATCHES, NAMES)
    tolerance = 1e-5 if QUANTISERS[quantiser].dtype == torch.float32 else 1e-1
    for name in NAMES:
        count = expected[name].num_tokens
        assert found[name].num_tokens == count
        for mine, theirs in (
            (found[name].G, expected[name].cross),
            (found[name].a, expected[name].input_square),
            (found[name].d, expected[name].error_square),
        ):
            mean = theirs / count
            assert np.linalg.norm(numpy_of(mine) - mean) < tolerance * np.linalg.norm(mean)


def test_how_four_bit_codes_are_stored_does_not_change_a_basis(folder: Path) -> None:
    one = adapted("fcca", model=load(folder, "nf4-bf16"), dtype=None)
    config = nf4(torch.bfloat16, bnb_4bit_use_double_quant=True)
    as_bytes = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    other = adapted("fcca", model=as_bytes, dtype=None)
    stored = [model.base_model.model.model.layers[0].self_attn.q_proj.weight.dtype for model in (one, other)]
    assert stored == [torch.bfloat16, torch.uint8]
    assert all_equal(factors_of(one), factors_of(other))


@EVERY_QUANTISER
def test_a_trainer_takes_every_quantised_base(folder: Path, quantiser: str) -> None:
    """transformers' own refuses torchao's 4 bits, though gradients pass."""
    model = adapted("fcca", model=load(folder, quantiser), dtype=None)
    before = fingerprint_model(model)
    rows = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(8, seed=5))]
    recipe = Recipe(learning_rate=5e-2, warmup=0.0, epochs=5, batch_size=8, accumulation=1)
    losses = train_by_recipe(model, rows, recipe, pad_id=0).training.losses
    assert losses[-1] < 0.9 * losses[0]
    assert fingerprint_model(model) == before
    assert not getattr(model.get_base_model(), "_hf_peft_config_loaded", False)
    assert all(bool(layer.core("default").any()) for layer in cores_of(model))


@EVERY_QUANTISER
def test_evaluation_between_steps_changes_no_gradient(folder: Path, quantiser: str) -> None:
    """On some CPUs bitsandbytes would round the weights and cut the gradient at the first evaluation."""
    gradients = []
    for evaluated in (False, True):
        model = adapted("rawgrad", model=load(folder, quantiser), dtype=None, trained=True)
        if evaluated:
            logits(model.eval())
        model.train()(**BATCHES[0]).loss.backward()
        gradients.append([layer.frozencore_R["default"].weight.grad for layer in cores_of(model)])
    assert all(torch.equal(plain, other) for plain, other in zip(*gradients, strict=True))


@EVERY_QUANTISER
def test_an_adapter_reloads_with_bit_equal_logits(folder: Path, quantiser: str, tmp_path: Path) -> None:
    model = adapted("fcca", model=load(folder, quantiser), dtype=None, trained=True)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(load(folder, quantiser), tmp_path)
    assert torch.equal(logits(loaded), logits(model))


@EVERY_QUANTISER
def test_a_merge_is_within_the_grid_and_unmerge_gives_the_same_bytes_back(folder: Path, quantiser: str) -> None:
    """Merging rounds each weight once more: by up to 1 % in eight bits, 10 % in four."""
    model = adapted("random", model=load(folder, quantiser), dtype=None)
    train_at_random(model, size=0.1)
    layers = cores_of(model)
    before, unmerged = fingerprint_model(model), logits(model)
    wanted = [layer.dense_weight().float() + layer.get_delta_weight("default") for layer in layers]
    with pytest.warns(UserWarning, match="Merging rounds the sum"):
        model.merge_adapter(safe_merge=True)
    worst = 0.01 if "int8" in quantiser else 0.1
    for layer, W in zip(layers, wanted, strict=True):
        assert float((layer.dense_weight().float() - W).norm() / W.norm()) < worst
    assert fingerprint_model(model) != before
    assert not torch.equal(logits(model), unmerged)
    model.unmerge_adapter()
    assert fingerprint_model(model) == before
    assert torch.equal(logits(model), unmerged)
    with model.disable_adapter():
        logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = model.merge_and_unload()
    assert not any("frozencore" in name for name in merged.state_dict())
    assert type(merged.get_submodule(layers[0].name)) is type(load(folder, quantiser).get_submodule(layers[0].name))


@pytest.mark.parametrize("quantiser", ["nf4", "torchao-int8"])
def test_adapters_merged_one_after_the_other_leave_together_and_the_base_is_what_it_was(
    folder: Path, quantiser: str
) -> None:
    """The layer is set aside once, before the first of them."""
    model = adapted("random", model=load(folder, quantiser), dtype=None)
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="random", seed=1))
    for name in ("default", "other"):
        train_at_random(model, name, size=0.1)
    before, layer = fingerprint_model(model), cores_of(model)[0]
    wanted = layer.dense_weight() + layer.get_delta_weight("default") + layer.get_delta_weight("other")
    with pytest.warns(UserWarning, match="Merging rounds the sum"):
        model.merge_adapter(["default"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.merge_adapter(["other"])
    assert not any("Merging rounds the sum" in str(warning.message) for warning in caught)  # said once
    assert layer.merged_adapters == ["default", "other"]
    assert float((layer.dense_weight() - wanted).norm() / wanted.norm()) < 0.15
    layer.unmerge()
    with pytest.warns(UserWarning, match=r"^Already unmerged. Nothing to do.$"):
        layer.unmerge()
    model.unmerge_adapter()
    assert fingerprint_model(model) == before


def test_a_merge_above_a_lora_goes_into_a_copy_of_the_quantised_layer_below_both(folder: Path) -> None:
    lora = get_peft_model(load(folder, "nf4"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model = adapted("random", model=lora.get_base_model(), dtype=None, target_modules=["q_proj"])
    train_at_random(model, size=0.1)
    layer = cores_of(model)[0]
    below = layer.base_layer
    plain, unmerged = below.base_layer, logits(model)
    with pytest.warns(UserWarning, match="Merging rounds the sum"):
        layer.merge()
    assert layer.base_layer is below
    assert below.base_layer is not plain
    layer.unmerge()
    assert below.base_layer is plain
    assert torch.equal(logits(model), unmerged)


def test_a_quantiser_without_dequantisation_refuses_merging_and_weight_spectra_in_one_line(folder: Path) -> None:
    """PEFT knows GPTQ, AWQ and others only in the forward direction."""
    model = adapted("fcca", model=load(folder, "nf4"), dtype=None, trained=True)
    for layer in cores_of(model):
        layer.quantization_backend = ForwardOnlyQuantizationBackend("gptq")
    with pytest.raises(ModelError, match="quantised by gptq cannot take a merged update"):
        model.merge_adapter()
    assert not any(layer.merged for layer in cores_of(model))
    with pytest.raises(ModelError, match=r"q_proj' cannot be read: .*such as fcca"):
        cores_of(model)[0].dense_weight()


@pytest.mark.parametrize("constructor", ["fcca", "eva"])
def test_a_quantiser_that_cuts_the_gradient_is_refused_where_a_gradient_is_needed(
    folder: Path, constructor: str
) -> None:
    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    model = get_peft_model(base, FrozenCoreConfig(r=3, constructor=constructor))
    if constructor == "eva":
        calibrate(model, BATCHES, progress=False)
        return
    with pytest.raises(ModelError, match="passes no gradient to its input"):
        calibrate(model, BATCHES, progress=False)
    assert not any(bool(layer.factors("default")[0].any()) for layer in cores_of(model))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes rewrites 4-bit weights only on CPUs with AVX512-BF16")
def test_a_four_bit_base_that_was_evaluated_before_runs_but_is_not_calibrated_trained_or_merged(folder: Path) -> None:
    base = load(folder, "nf4")
    expected = logits(base)
    model = get_peft_model(base, FrozenCoreConfig(r=3, constructor="random"))
    assert torch.equal(logits(model), expected)
    train_at_random(model)
    for use in (
        lambda: get_peft_model(copy.deepcopy(base), FrozenCoreConfig(r=3, constructor="lora_xs")),
        lambda: collect_moments(base, BATCHES, NAMES),
        lambda: model(**BATCHES[0]),
        lambda: model.merge_adapter(),
    ):
        with pytest.raises(ModelError, match="was evaluated before.*Load the model again"):
            use()


@EVERY_QUANTISER
def test_the_lora_export_of_a_quantised_adapter_gives_the_same_logits_on_its_base(
    folder: Path, quantiser: str, tmp_path: Path
) -> None:
    model = adapted("fcca", model=load(folder, quantiser), dtype=None)
    train_at_random(model, size=0.1)
    export_lora(model, tmp_path / "lora")
    other = PeftModel.from_pretrained(load(folder, quantiser).train(), tmp_path / "lora")
    for module in other.modules():  # stock PEFT lets bitsandbytes rewrite the weights
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    expected = logits(model)
    # how roundings to bfloat16 add up depends on the machine's kernels: .0303 where the CPU has bfloat16 instructions
    tolerance = 1e-5 if QUANTISERS[quantiser].dtype == torch.float32 else 8 * torch.finfo(torch.bfloat16).eps
    assert float((logits(other.eval()) - expected).abs().max() / expected.abs().max()) < tolerance


def test_an_adapter_of_a_quantised_base_is_merged_into_the_unquantised_one(folder: Path, tmp_path: Path) -> None:
    """As docs/large-models.md says: the quantised weights have no record, so the basis names no base."""
    model = adapted("fcca", model=load(folder, "nf4"), dtype=None)
    train_at_random(model, size=0.1)
    model.save_pretrained(str(tmp_path / "adapter"))
    on_plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "adapter"))
    export_merged(tmp_path / "adapter", tmp_path / "merged", base=folder)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), logits(on_plain), atol=1e-4)
    assert all(torch.equal(*both) for both in zip(factors_of(on_plain), factors_of(model), strict=True))
