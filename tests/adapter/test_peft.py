"""Frozen cores as a PEFT method: PEFT's usual operations, beyond PEFT's own suite (make conformance)."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
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
from peft.helpers import disable_input_dtype_casting
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import AutoModelForCausalLM

from fixtures import few
from frozencore import (
    CONSTRUCTORS,
    FrozenCoreConfig,
    calibrate,
    export_lora,
    export_merged,
    get_basis,
    save_basis,
    set_basis,
    swap_core,
)
from frozencore.adapter.layer import UncalibratedWarning
from frozencore.adapter.loaded_adapter import frozen_core_layers
from frozencore.adapter.shared_factors import SharedFactors
from frozencore.errors import ArtifactError
from tiny import (
    BATCHES,
    adapted,
    all_equal,
    core_with,
    cores_of,
    factors_of,
    logits,
    needs_own_integration,
    on_one_basis,
    tiny_qwen2,
    train_at_random,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("constructor", few(CONSTRUCTORS, "fcca", "eva", "milora", "random"))
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


@pytest.mark.parametrize("low_memory", [False, True])
def test_loading_rounds_the_bases_to_a_narrower_model_and_not_the_core(low_memory: bool, tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2().bfloat16(), str(tmp_path), low_cpu_mem_usage=low_memory)
    for layer, other in zip(cores_of(model), cores_of(loaded), strict=True):
        (P, Q, R), found = layer.factors("default"), other.factors("default")
        for expected, mine in zip((P.bfloat16(), Q.bfloat16(), R), found, strict=True):
            assert mine.dtype == expected.dtype
            assert torch.equal(mine, expected)


def test_loading_draws_no_random_number_and_builds_no_basis(tmp_path: Path) -> None:
    """The base differs from the one of the adapter: a basis built anew from its weights would differ too."""
    model = adapted("lora_xs", trained=True)
    model.save_pretrained(str(tmp_path))
    state = torch.get_rng_state()
    loaded = PeftModel.from_pretrained(tiny_qwen2(seed=9), str(tmp_path), allow_other_base=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all_equal(factors_of(model), factors_of(loaded))


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
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings
    torch.testing.assert_close(logits(model.merge_and_unload()), expected, rtol=1e-4, atol=1e-4)


def test_a_merge_without_the_head_leaves_it_tied() -> None:
    model = adapted("random", model=tiny_qwen2(), trained=True, target_modules=["lm_head"])
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="random", target_modules=["q_proj"]))
    model.merge_adapter(["other"])
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings


def test_one_module_to_save_may_be_a_name_alone() -> None:
    config = FrozenCoreConfig(r=2, constructor="random", modules_to_save="lm_head")
    model = get_peft_model(tiny_qwen2(), config)
    beside = {name for name, p in model.named_parameters() if p.requires_grad and "frozencore" not in name}
    assert beside == {"base_model.model.lm_head.modules_to_save.default.weight"}


def test_a_name_that_no_adapted_layer_has_is_said() -> None:
    with pytest.warns(UserWarning, match="No adapted layer is called v_prj"):
        adapted("random", target_modules=["q_proj", "v_prj"])
    with pytest.warns(UserWarning, match=r"No adapted layer has the number 30 \(layers_to_transform\)"):
        adapted("random", target_modules=["q_proj"], layers_to_transform=[1, 30])
    with pytest.warns(UserWarning, match=r"No module is called lm_haed \(modules_to_save\)"):
        adapted("random", modules_to_save=["lm_head", "lm_haed"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        adapted("random", target_modules=["q_proj", "model.layers.1.self_attn.v_proj"])
        adapted("random", target_modules="all-linear", exclude_modules=["down_proj"])
        adapted("random", target_modules=["q_proj"], layers_to_transform=1, modules_to_save=["norm"])


def test_an_adapter_that_shares_a_basis_keeps_what_its_calibration_found() -> None:
    model = adapted("fcca")
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    first, other = (model.peft_config[name] for name in ("default", "other"))
    assert first.learning_rate is not None
    assert (other.calibration_tokens, other.learning_rate) == (first.calibration_tokens, first.learning_rate)


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


def test_a_core_stands_on_a_layer_that_has_a_lora_of_another_name() -> None:
    base = get_peft_model(tiny_qwen2(), LoraConfig(target_modules=["q_proj"])).base_model.model
    model = get_peft_model(base, FrozenCoreConfig(r=3, target_modules=["q_proj"]), adapter_name="core")
    calibrate(model, BATCHES, adapter_name="core", progress=False)
    assert len(cores_of(model, "core")) == 2


def test_peft_leaves_the_dtype_of_inputs_as_it_is_if_asked() -> None:
    model = adapted("random", trained=True)
    expected = logits(model)
    with disable_input_dtype_casting(model):
        assert torch.equal(logits(model), expected)
        with pytest.raises(RuntimeError, match="dtype"):
            cores_of(model)[0].double()(torch.ones(1, 32))


def test_peft_reports_the_state_of_an_adapter() -> None:
    model = adapted("fcca", trained=True)
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="vera", target_modules=["q_proj", "up_proj"]))
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
def test_transformers_own_integration_calibrates_and_saves_and_its_loading_names_two_ways_out(tmp_path: Path) -> None:
    model = tiny_qwen2()
    model.add_adapter(FrozenCoreConfig(r=3, coordinates="qr"), adapter_name="mine")
    calibrate(model, BATCHES, adapter_name="mine", progress=False)
    assert all_equal(factors_of(model, "mine"), factors_of(adapted("fcca")))
    train_at_random(model, "mine")
    model.save_pretrained(tmp_path)
    other = tiny_qwen2()
    with pytest.raises(ArtifactError, match=r"PeftModel\.from_pretrained\(model, FOLDER\), or export") as refused:
        other.load_adapter(str(tmp_path), adapter_name="theirs")
    assert "\n" not in str(refused.value)
    assert torch.equal(logits(other), logits(tiny_qwen2()))
    loaded = PeftModel.from_pretrained(other, str(tmp_path))
    assert torch.equal(logits(loaded.eval()), logits(model.eval()))
    model.disable_adapters()
    assert torch.equal(logits(model), logits(tiny_qwen2()))
    export_lora(tmp_path, tmp_path / "lora", base=tiny_qwen2())
    plain = tiny_qwen2()
    plain.load_adapter(str(tmp_path / "lora"))
    torch.testing.assert_close(logits(plain.eval()), logits(loaded), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "tied", "stays"),
    [
        ({"modules_to_save": ["lm_head"]}, False, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True, True),
        ({"trainable_token_indices": [1, 2]}, True, True),
        ({"trainable_token_indices": {"lm_head": [1, 2]}}, True, False),
        ({"trainable_token_indices": {"embed_tokens": [5], "lm_head": [7]}}, True, False),
    ],
    ids=["a module", "tied embeddings", "tokens", "tokens of the head", "other tokens of each"],
)
def test_what_trains_beside_the_cores_is_saved_and_merged_with_them(
    options: dict, tied: bool, stays: bool, tmp_path: Path
) -> None:
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
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == plain.config.tie_word_embeddings == stays


def test_trained_tokens_of_a_tied_head_do_not_count_as_its_base_weight(tmp_path: Path) -> None:
    options = {"target_modules": ["lm_head"], "trainable_token_indices": [0]}
    model = adapted("random", model=tiny_qwen2(tie_word_embeddings=True), trained=True, **options)
    model.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta["default"].data += 1
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2(tie_word_embeddings=True), str(tmp_path)).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_a_named_basis_that_was_changed_in_inference_mode_is_saved_with_the_adapter(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = adapted("random", model=tiny_qwen2(), trained=True)
        save_basis(model, tmp_path / "basis")
        cores_of(model)[0].frozencore_P["default"].neg_()  # an inference tensor counts no changes
        model.save_pretrained(str(tmp_path / "adapter"))
        loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "adapter")).eval()
        assert torch.equal(logits(loaded), logits(model))


def test_cores_that_are_drawn_change_an_untrained_model() -> None:
    assert not torch.equal(logits(adapted("random", init_weights=False)), logits(tiny_qwen2()))


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
        swap_core(made_here, core_with(made_here, {layer.name: torch.ones(3, 3) for layer in cores_of(made_here)}))
        assert not torch.equal(logits(made_here), expected)
        base = made_here.unload()
    lora = get_peft_model(base, LoraConfig(r=3))
    assert torch.equal(logits(lora.unload()), expected)
    model = get_peft_model(base, FrozenCoreConfig(r=3))
    assert torch.equal(logits(model.eval()), expected)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        calibrate(model, BATCHES, progress=False)


def holders(model: nn.Module, *names: str) -> list[set[int]]:
    """The storage of P, and of Q, under each name, layer by layer."""
    pointers = []
    for layer in frozen_core_layers(model, names[0]).values():
        for side in (layer.frozencore_P, layer.frozencore_Q):
            pointers.append({side[name].data_ptr() for name in names})
    return pointers


@pytest.mark.parametrize("low_memory", [False, True])
def test_adapters_that_are_cast_and_loaded_share_too_and_no_factor_is_rounded(low_memory: bool, tmp_path: Path) -> None:
    model = on_one_basis("a", "b", "c").to(torch.bfloat16)
    for name in "abc":  # the whole model was cast, the cores too
        model.base_model._cast_adapter_dtype(name)
    train_at_random(model, "b", seed=4)
    assert all(len(held) == 1 for held in holders(model, "a", "b", "c"))
    model.save_pretrained(str(tmp_path))
    base = tiny_qwen2().to(torch.bfloat16)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "a"), adapter_name="a", low_cpu_mem_usage=low_memory)
    loaded.load_adapter(str(tmp_path / "b"), adapter_name="b", low_cpu_mem_usage=low_memory)
    assert all(len(held) == 1 for held in holders(loaded, "a", "b"))
    assert all(all_equal(factors_of(model, name), factors_of(loaded, name)) for name in "ab")


def load_another_p(model: PeftModel) -> None:
    changed = {key: torch.randn_like(X) for key, X in model.state_dict().items() if "frozencore_P.a" in key}
    model.load_state_dict(changed, strict=False)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in changed.items())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: set_basis(model, get_basis(adapted("random")), adapter_name="a", reset=True),
        load_another_p,
        lambda model: model.delete_adapter("a"),
    ],
    ids=["set", "loaded", "deleted"],
)
def test_another_basis_for_one_leaves_the_other_its_own(change: Callable[[PeftModel], object]) -> None:
    model = on_one_basis("a", "b")
    model.set_adapter("b")
    before = logits(model)
    change(model)
    assert torch.equal(logits(model), before)
    if "a" in model.peft_config:
        assert any(len(held) == 2 for held in holders(model, "a", "b"))


def with_reference(model: PeftModel, *more: str) -> PeftModel:
    """Another adapter of the same configuration, as TRL adds its reference."""
    for name in ("ref", *more):
        model.add_adapter(name, model.peft_config["default"])
        train_at_random(model, name, seed=len(name))
    return model


def same_outputs(one: PeftModel, other: PeftModel, *names: str) -> bool:
    found = []
    for model in (one, other):
        for name in names:
            model.set_adapter(name)
            found.append(logits(model.eval()))
    return all(map(torch.equal, found[: len(names)], found[len(names) :]))


def test_an_adapter_beside_one_of_the_same_configuration_gets_its_basis() -> None:
    model = with_reference(adapted("fcca", trained=True))
    assert all(len(held) == 1 for held in holders(model, "default", "ref"))
    for other in ({"damping": 0.5}, {"r": 2}, {"alpha": 8.0}, {"constructor": "rawgrad"}):
        options = {"r": 3, "constructor": "fcca", "alpha": None, "coordinates": "qr", **other}
        model.add_adapter("another", FrozenCoreConfig(**options))
        assert not any(layer.frozencore_P["another"].any() for layer in cores_of(model, "another"))
        model.delete_adapter("another")


@pytest.mark.parametrize("constructor", ["fcca", "random"])
def test_a_reference_gets_the_basis_of_the_adapter_whose_configuration_it_was_given(constructor: str) -> None:
    model = adapted(constructor)
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    set_basis(model, get_basis(adapted("eva")), adapter_name="second")
    model.add_adapter("ref", model.peft_config["second"])
    assert get_basis(model, "ref").id == get_basis(model, "second").id != get_basis(model, "default").id


def test_an_adapter_beside_two_of_its_options_says_whose_basis_it_got() -> None:
    model = adapted("fcca")
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    set_basis(model, get_basis(adapted("eva")), adapter_name="second")
    with pytest.warns(UserWarning, match="'default' and 'second' have different ones: 'third' got that of 'default'"):
        model.add_adapter("third", copy.deepcopy(model.peft_config["default"]))
    assert get_basis(model, "third").id == get_basis(model, "default").id


def test_adapters_added_before_calibration_get_the_basis_too_and_a_second_calibration_leaves_it() -> None:
    model = with_reference(adapted("fcca", calibrated=False))
    calibrate(model, BATCHES, adapter_name="default", progress=False)
    assert all(len(held) == 1 for held in holders(model, "default", "ref"))
    before = get_basis(model, "default").id
    calibrate(model, BATCHES[:1], adapter_name="ref", reset=True, progress=False)
    assert all(len(held) == 2 for held in holders(model, "default", "ref"))
    assert get_basis(model, "default").id == before


def test_a_state_dict_holds_each_basis_once_and_the_adapter_is_saved_whole(tmp_path: Path) -> None:
    model = with_reference(adapted("fcca", trained=True))
    assert not any(".ref" in name for name in model.state_dict() if "frozencore_R" not in name)
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "ref"), adapter_name="ref")
    assert same_outputs(loaded, model, "ref")


def fresh() -> PeftModel:
    return with_reference(adapted("fcca", calibrated=False))


def on_two_bases() -> PeftModel:
    model = adapted("fcca")
    model.add_adapter("ref", FrozenCoreConfig(r=3, constructor="rawgrad", alpha=None, coordinates="qr"))
    calibrate(model, BATCHES, adapter_name="ref", progress=False)
    return model


def restored_by_accelerate(model: PeftModel, other: PeftModel, folder: Path) -> None:
    for each, transfer in ((model, Accelerator.save_state), (other, Accelerator.load_state)):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(each)
        transfer(accelerator, str(folder / "state"))


LOADERS: dict[str, Callable[[PeftModel, PeftModel, Path], object]] = {
    "state dict": lambda model, other, _: other.load_state_dict(model.state_dict()),
    "assigned": lambda model, other, _: other.load_state_dict(model.state_dict(), assign=True),
    "safetensors": lambda model, other, folder: (
        save_model(model, str(folder / "model")), load_model(other, str(folder / "model"), strict=True)
    ),
    "accelerate": restored_by_accelerate,
}  # fmt: skip


@pytest.mark.parametrize("way", LOADERS)
@pytest.mark.parametrize("into", [fresh, on_two_bases])
def test_a_shared_basis_comes_back_by_every_loader(way: str, into: Callable[[], PeftModel], tmp_path: Path) -> None:
    model, other = with_reference(adapted("fcca", trained=True)), into()
    LOADERS[way](model, other, tmp_path)
    assert same_outputs(model, other, "default", "ref")
    assert all(len(held) == 1 for held in holders(other, "default", "ref"))


def test_a_state_dict_with_a_basis_for_each_adapter_loads_too() -> None:
    model = on_two_bases()
    train_at_random(model, "ref")
    other = fresh()
    other.load_state_dict(model.state_dict())
    assert same_outputs(model, other, "default", "ref")


def test_a_state_that_cannot_be_loaded_leaves_a_shared_basis_as_it_was() -> None:
    shared = SharedFactors()
    shared["one"], shared["two"] = torch.ones(3, 2), torch.ones(3, 2)
    shared.share("two")
    shared.split_shared(["one"], ["one"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        shared.load_state_dict({"one": torch.ones(4, 2)}, strict=False)
    assert all(torch.equal(shared[name], torch.ones(3, 2)) for name in ("one", "two"))


def test_a_basis_that_cannot_be_known_is_missing_and_never_guessed() -> None:
    model = with_reference(adapted("fcca", trained=True), "third")
    set_basis(model, get_basis(adapted("random")), adapter_name="third", reset=True)
    other = with_reference(adapted("fcca", calibrated=False), "third")
    with pytest.raises(RuntimeError, match="Missing key.*frozencore_P.ref"):
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trained_core_on_a_basis_of_zeros_says_so_once_in_evaluation(compiled: bool) -> None:
    cores = {name: p for name, p in adapted("fcca", trained=True).named_parameters() if p.requires_grad}
    model = adapted("fcca", calibrated=False)
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(input_ids=BATCHES[0]["input_ids"])
        model.load_state_dict(cores, strict=False)
        assert not [one for one in caught if issubclass(one.category, UncalibratedWarning)]
        for _ in range(2):
            call(input_ids=BATCHES[0]["input_ids"])
    (said,) = [str(one.message) for one in caught if issubclass(one.category, UncalibratedWarning)]
    assert "'default' has a trained core and no basis" in said
