"""Frozen cores as a PEFT method: PEFT's usual operations, beyond PEFT's own suite (make conformance)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_layer_status,
    get_model_status,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from torch import nn
from transformers import AutoModelForCausalLM

from adapted import BATCHES, adapted, cores_of, logits, needs_own_integration, train_at_random
from frozencore import CONSTRUCTORS, FrozenCoreConfig, calibrate, export_merged, swap_core
from frozencore.errors import CalibrationError, ModelError
from tiny import tiny_qwen2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_an_adapter_reloads_bit_equal(constructor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "base")

    def base() -> nn.Module:  # loaded, not cast: model.to(bfloat16) would round the rotary frequencies as well
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype).eval()

    model = adapted(constructor, model=base(), dtype=None, trained=True, rank_pattern={"k_proj": 2}, alpha=5.0)
    model.save_pretrained(str(tmp_path / "adapter"))
    assert not torch.equal(logits(model), logits(base()))
    for low_memory in (False, True):
        loaded = PeftModel.from_pretrained(base(), str(tmp_path / "adapter"), low_cpu_mem_usage=low_memory)
        assert torch.equal(logits(loaded), logits(model))


def test_loading_draws_no_random_number_and_builds_no_basis(tmp_path: Path) -> None:
    """The base differs from the one of the adapter: a basis built anew from its weights would differ too."""
    model = adapted("lora_xs", trained=True)
    model.save_pretrained(str(tmp_path))
    state = torch.get_rng_state()
    loaded = PeftModel.from_pretrained(tiny_qwen2(seed=9), str(tmp_path), allow_other_base=True)
    assert torch.equal(torch.get_rng_state(), state)
    for layer, other in zip(cores_of(model), cores_of(loaded), strict=True):
        for factor, same in zip(layer.factors("default"), other.factors("default"), strict=True):
            assert torch.equal(factor, same)


def test_a_reloaded_adapter_trains_on_with_its_basis(tmp_path: Path) -> None:
    model = adapted("fcca", trained=True)
    model.save_pretrained(str(tmp_path))
    assert not any(p.requires_grad for p in PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).parameters())
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path), is_trainable=True).train()
    gradients = []
    for each in (model.train(), loaded):
        each(**BATCHES[0]).loss.backward()
        gradients.append([layer.frozencore_R["default"].weight.grad for layer in cores_of(each)])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_several_adapters_switch_and_do_not_mix() -> None:
    base = logits(tiny_qwen2())
    model = adapted("random", trained=True)
    first = logits(model)
    model.add_adapter("other", FrozenCoreConfig(r=5, constructor="vera", alpha=2.0, target_modules=["q_proj"]))
    assert torch.equal(logits(model), first)
    train_at_random(model, "other", seed=1)
    assert torch.equal(logits(model), first)
    model.set_adapter("other")
    other = logits(model)
    alone = adapted("vera", r=5, alpha=2.0, target_modules=["q_proj"])
    train_at_random(alone, seed=1)
    assert torch.equal(other, logits(alone))
    model.base_model.set_adapter(["default", "other"])
    both = logits(model)
    assert not torch.equal(both, first)
    assert not torch.equal(both, other)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), both)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


def test_merging_a_core_on_a_tied_head_leaves_the_embedding_as_it_is(tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "base")
    model = adapted("random", model=tiny_qwen2(), trained=True, target_modules=["lm_head", "q_proj"])
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model)
    export_merged(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert exported.config.tie_word_embeddings is False
    torch.testing.assert_close(logits(exported), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(exported.get_input_embeddings().weight, tiny_qwen2().get_input_embeddings().weight)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model.merge_and_unload()), expected, rtol=1e-4, atol=1e-4)


def test_a_deleted_adapter_leaves_nothing_behind() -> None:
    model = adapted("random", trained=True)
    first = logits(model)
    keys = set(model.state_dict())
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="vera"))
    model.delete_adapter("other")
    assert set(model.state_dict()) == keys
    assert torch.equal(logits(model), first)
    assert not any(
        "other" in getattr(layer, name)
        for layer in cores_of(model)
        for name in layer.adapter_layer_names + layer.other_param_names
    )
    model.add_adapter("other", FrozenCoreConfig(r=4, constructor="vera"))
    assert len(cores_of(model, "other")[0].core("other")) == 4


def two_adapters() -> PeftModel:
    model = adapted("fcca", trained=True)
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="vera", target_modules=["q_proj", "up_proj"]))
    train_at_random(model, "other", seed=1)
    return model.eval()


def test_cores_take_the_base_models_dtype_only_if_asked() -> None:
    base = tiny_qwen2().to(torch.bfloat16)
    model = get_peft_model(base, FrozenCoreConfig(r=3, constructor="random"), autocast_adapter_dtype=False)
    assert {layer.factors("default")[2].dtype for layer in cores_of(model)} == {torch.bfloat16}
    model.add_adapter("other", FrozenCoreConfig(r=3, constructor="random"))
    assert {layer.factors("other")[2].dtype for layer in cores_of(model)} == {torch.float32}


def test_an_injected_adapter_needs_no_peft_model() -> None:
    expected = adapted("fcca", trained=True)
    model = inject_adapter_in_model(FrozenCoreConfig(r=3, alpha=None), tiny_qwen2()).eval()
    assert not isinstance(model, PeftModel)
    report = set_peft_model_state_dict(model, get_peft_model_state_dict(expected))
    assert not report.unexpected_keys
    assert torch.equal(logits(model), logits(expected))


def test_peft_reports_the_state_of_an_adapter() -> None:
    model = two_adapters()
    status = get_model_status(model)
    assert status.adapter_model_type == "FrozenCoreModel"
    assert status.peft_types == {"default": "FROZENCORE", "other": "FROZENCORE"}
    assert (status.enabled, status.active_adapters, status.merged_adapters) == (True, ["default"], [])
    assert status.num_adapter_layers == 10
    assert status.trainable_params == 8 * 9
    model.merge_adapter()
    assert get_model_status(model).merged_adapters == ["default"]
    assert {layer.module_type for layer in get_layer_status(model)} == {"frozencore.FrozenCoreLinear"}


@needs_own_integration
def test_transformers_own_integration_calibrates_saves_and_loads_the_adapter(tmp_path: Path) -> None:
    model = tiny_qwen2()
    model.add_adapter(FrozenCoreConfig(r=3, coordinates="qr"), adapter_name="mine")
    calibrate(model, BATCHES, adapter_name="mine", progress=False)
    for layer, other in zip(cores_of(model, "mine"), cores_of(adapted("fcca")), strict=True):
        assert torch.equal(layer.factors("mine")[0], other.factors("default")[0])
    train_at_random(model, "mine")
    model.save_pretrained(tmp_path)
    loaded = tiny_qwen2()
    loaded.load_adapter(str(tmp_path), adapter_name="theirs")
    assert torch.equal(logits(loaded.eval()), logits(model.eval()))
    loaded.disable_adapters()
    assert torch.equal(logits(loaded), logits(tiny_qwen2()))
    loaded.enable_adapters()
    loaded.delete_adapter("theirs")
    assert torch.equal(logits(loaded), logits(tiny_qwen2()))


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"trainable_token_indices": [1, 2]}, True),
    ],
    ids=["a module", "tied embeddings", "tokens"],
)
def test_what_trains_beside_the_cores_is_saved_and_merged_with_them(options: dict, tied: bool, tmp_path: Path) -> None:
    def base() -> nn.Module:
        return tiny_qwen2(tie_word_embeddings=tied)

    model = adapted("random", model=base(), trained=True, **options)
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if p.requires_grad and "frozencore" not in name):
            parameter += 0.1
    expected = logits(model)
    assert not torch.equal(expected, logits(adapted("random", model=base(), trained=True)))
    model.save_pretrained(str(tmp_path))
    assert torch.equal(logits(PeftModel.from_pretrained(base(), str(tmp_path)).eval()), expected)
    plain = model.merge_and_unload()
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-4)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("constructor", ["random", "fcca"])
def test_random_cores_change_an_untrained_model_and_zero_ones_do_not(constructor: str) -> None:
    base = logits(tiny_qwen2())
    assert torch.equal(logits(adapted(constructor)), base)
    model = adapted(constructor, init_weights=False)
    assert not torch.equal(logits(model), base)
    with pytest.raises(CalibrationError, match="Pass reset=True"):
        calibrate(model, BATCHES, progress=False)


def test_an_old_peft_is_refused_in_one_line() -> None:
    program = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '0.19.1' if name == 'peft' else real(name)\n"
        "import frozencore"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: frozencore needs peft 0.21 or newer, but 0.19.1 is installed" in done.stderr


def test_a_model_of_inference_tensors_is_built_and_used_but_not_calibrated() -> None:
    with torch.inference_mode():
        base = tiny_qwen2()
        expected = logits(base)
        made_here = get_peft_model(base, FrozenCoreConfig(r=3, constructor="random")).eval()
        swap_core(made_here, {layer.name: torch.ones(3, 3) for layer in cores_of(made_here)})
        assert not torch.equal(logits(made_here), expected)
        base = made_here.unload()
    lora = get_peft_model(base, LoraConfig(r=3))
    assert torch.equal(logits(lora.unload()), expected)
    model = get_peft_model(base, FrozenCoreConfig(r=3))
    assert torch.equal(logits(model.eval()), expected)
    with pytest.raises(ModelError, match=r"was made under torch.inference_mode\(\), where no gradient passes"):
        calibrate(model, BATCHES, progress=False)
