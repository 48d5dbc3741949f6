"""PEFT's usual operations on an adapter, beyond PEFT's own suite (make conformance)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
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
from frozencore import FrozenCoreConfig, calibrate, prepare_swap, swap_core
from frozencore.errors import ArtifactError, CalibrationError, ConfigError, ModelError
from tiny import tiny_gpt2, tiny_qwen2

ROWS = ["default", "__base__", "other", "default"]
PROMPT = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}


def two_adapters() -> PeftModel:
    model = adapted("fcca", trained=True)
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="vera", target_modules=["q_proj", "up_proj"]))
    train_at_random(model, "other", seed=1)
    return model.eval()


def greedy(model: nn.Module, rows: slice, **options: object) -> torch.Tensor:
    prompt = {key: value[rows] for key, value in PROMPT.items()}
    return model.generate(**prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, **options)


def test_each_row_of_a_mixed_batch_is_its_adapters_own() -> None:
    model = two_adapters()
    mixed = model(**PROMPT, adapter_names=ROWS).logits
    for row, name in enumerate(ROWS):
        if name == "__base__":
            with model.disable_adapter():
                alone = logits(model)
        else:
            model.set_adapter(name)
            alone = logits(model)
        torch.testing.assert_close(mixed[row], alone[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["v1.5", ".", "", "train", "items", "share", "join"])
def test_a_name_that_no_module_can_have_is_one_line_and_leaves_the_model(name: str) -> None:
    config = FrozenCoreConfig(r=2, constructor="random", target_modules=["q_proj"])
    with pytest.raises(ConfigError, match=r"An adapter's name has no dot and .* Choose another name\.") as refused:
        get_peft_model(tiny_qwen2(), config, adapter_name=name)
    assert "\n" not in str(refused.value)
    model = two_adapters()
    before = logits(model)
    with pytest.raises(ConfigError, match="An adapter's name"):
        model.add_adapter(name, config)
    assert (list(model.peft_config), torch.equal(logits(model), before)) == (["default", "other"], True)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_keeps_the_rows_apart(num_beams: int) -> None:
    model = two_adapters()
    mixed = greedy(model, slice(None), adapter_names=ROWS, num_beams=num_beams)
    for name in ("default", "other"):
        model.set_adapter(name)
        rows = [row for row, own in enumerate(ROWS) if own == name]
        assert torch.equal(greedy(model, slice(None), num_beams=num_beams)[rows], mixed[rows])


@pytest.mark.parametrize(
    ("names", "message"),
    [(["default", "defualt", "other", "other"], "non-existing adapter.*defualt"), (["default"] * 3, "Length of")],
)
def test_a_wrong_mixed_batch_is_refused_and_leaves_no_hook(names: list[str], message: str) -> None:
    model = two_adapters()
    before = logits(model)
    with pytest.raises(ValueError, match=message):
        model(**PROMPT, adapter_names=names)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(logits(model), before)


def test_a_mixed_batch_is_refused_while_an_adapter_is_merged() -> None:
    """A merged update would be added to every row."""
    model = two_adapters()
    model.merge_adapter(["other"])
    with pytest.raises(ValueError, match="merged adapters, please call `unmerge_adapter` first"):
        model(**PROMPT, adapter_names=ROWS)
    model.unmerge_adapter()
    model(**PROMPT, adapter_names=ROWS)


def test_a_mixed_batch_does_not_train() -> None:
    with pytest.raises(ValueError, match="training mode"):
        two_adapters().train()(**PROMPT, adapter_names=ROWS)


@pytest.mark.parametrize("low_memory", [False, True])
def test_loading_rounds_no_factor_of_a_bf16_model(low_memory: bool, tmp_path: Path) -> None:
    model = adapted("fcca", dtype=torch.bfloat16, trained=True)
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2().to(torch.bfloat16), str(tmp_path), low_cpu_mem_usage=low_memory)
    loaded.load_adapter(str(tmp_path), "again", low_cpu_mem_usage=low_memory)
    for name in ("default", "again"):
        for layer, other in zip(cores_of(model), cores_of(loaded, name), strict=True):
            for mine, theirs in zip(layer.factors("default"), other.factors(name), strict=True):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs)


def test_cores_take_the_base_models_dtype_only_if_asked() -> None:
    base = tiny_qwen2().to(torch.bfloat16)
    model = get_peft_model(base, FrozenCoreConfig(r=3, constructor="random"), autocast_adapter_dtype=False)
    assert {layer.factors("default")[2].dtype for layer in cores_of(model)} == {torch.bfloat16}
    model.add_adapter("other", FrozenCoreConfig(r=3, constructor="random"))
    assert {layer.factors("other")[2].dtype for layer in cores_of(model)} == {torch.float32}


def test_a_swapped_core_is_the_saved_adapter_in_the_same_memory(tmp_path: Path) -> None:
    model = adapted("fcca", trained=True, alpha=5.0)
    first = logits(model)
    state = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    places = [factor.data_ptr() for layer in cores_of(model) for factor in layer.factors("default")]
    train_at_random(model, seed=7)
    second = logits(model)
    model.save_pretrained(str(tmp_path))
    for source, expected in ((state, first), (tmp_path, second), (state, first)):
        swap_core(model, source)
        assert torch.equal(logits(model), expected)
    assert places == [factor.data_ptr() for layer in cores_of(model) for factor in layer.factors("default")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constructor": "random", "alpha": 5.0}, "its own basis"),
        ({"constructor": "fcca", "alpha": 6.0}, "at scale 2, but .* 1.66667"),
        ({"constructor": "fcca", "alpha": 5.0, "target_modules": ["q_proj"]}, "a core on one side only"),
        ({"constructor": "fcca", "alpha": 5.0, "modules_to_save": ["norm"]}, "Only cores can be swapped"),
        ({"constructor": "fcca", "alpha": 5.0, "r": 2}, "at scale 2.5"),
    ],
)
def test_a_core_that_would_mean_something_else_is_not_swapped(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    adapted(**options, trained=True).save_pretrained(str(tmp_path))
    model = adapted("fcca", trained=True, alpha=5.0)
    before = logits(model)
    with pytest.raises(ArtifactError, match=message) as caught:
        swap_core(model, tmp_path)
    assert "\n" not in str(caught.value)
    assert torch.equal(logits(model), before)


def test_a_state_dict_with_more_than_cores_is_not_swapped() -> None:
    model = adapted("fcca", trained=True)
    before = logits(model)
    state = {**get_peft_model_state_dict(model), "base_model.model.lm_head.weight": torch.ones(40, 32)}
    with pytest.raises(ArtifactError, match=r"Only cores can be swapped, but .*lm_head.weight' \(1 in all\)") as caught:
        swap_core(model, state)
    assert "\n" not in str(caught.value)
    assert torch.equal(logits(model), before)


def test_no_core_is_swapped_under_a_merged_or_an_unknown_adapter() -> None:
    model = adapted("fcca", trained=True)
    state = get_peft_model_state_dict(model)
    with pytest.raises(ConfigError, match="none called 'other'"):
        swap_core(model, state, adapter_name="other")
    model.merge_adapter()
    with pytest.raises(ConfigError, match="unmerge_adapter"):
        swap_core(model, state)


def test_prepared_cores_are_swapped_in_again_and_again_whatever_the_loaded_core_became() -> None:
    model = adapted("fcca", trained=True)
    ready, expected = [], []
    for seed in (1, 2):
        train_at_random(model, seed=seed)
        ready.append(prepare_swap(model, get_peft_model_state_dict(model)))
        expected.append(logits(model))
    train_at_random(model, seed=3)
    places = [layer.factors("default")[2].data_ptr() for layer in cores_of(model)]
    for choice in (0, 1, 0):
        ready[choice].swap_in()
        assert torch.equal(logits(model), expected[choice])
    assert places == [layer.factors("default")[2].data_ptr() for layer in cores_of(model)]


def test_prepared_cores_are_refused_once_the_adapter_is_another_one() -> None:
    model = adapted("fcca", trained=True)
    ready = prepare_swap(model, get_peft_model_state_dict(model))
    model.merge_adapter()
    with pytest.raises(ConfigError, match="unmerge_adapter"):
        ready.swap_in()
    model.unmerge_adapter()
    ready.swap_in()
    calibrate(model, BATCHES[:1], progress=False, reset=True)
    before = logits(model)
    with pytest.raises(ConfigError, match="set or moved since. Call prepare_swap again"):
        ready.swap_in()
    assert torch.equal(logits(model), before)


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


def test_the_auto_class_finds_base_model_and_adapter(tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = adapted("fcca", model=base, trained=True, task_type="CAUSAL_LM")
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter")).eval()
    assert torch.equal(logits(loaded), logits(model))


@needs_own_integration
def test_transformers_own_integration_saves_and_loads_the_adapter(tmp_path: Path) -> None:
    model = tiny_qwen2()
    model.add_adapter(FrozenCoreConfig(r=3), adapter_name="mine")
    calibrate(model, BATCHES, adapter_name="mine", progress=False)
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


def test_layers_and_modules_are_chosen_as_in_lora() -> None:
    def names(**options: object) -> set[str]:
        return {layer.name.removeprefix("model.layers.") for layer in cores_of(adapted("random", **options))}

    assert names(target_modules=["q_proj", "o_proj"], layers_to_transform=1) == {
        "1.self_attn.q_proj",
        "1.self_attn.o_proj",
    }
    assert names(target_modules=["q_proj"], layers_to_transform=[0], layers_pattern="layers") == {"0.self_attn.q_proj"}
    assert names(target_modules=["q_proj", "v_proj"], exclude_modules=["layers.0.self_attn.q_proj"]) == {
        "0.self_attn.v_proj",
        "1.self_attn.q_proj",
        "1.self_attn.v_proj",
    }


def test_new_tokens_train_beside_the_cores_and_are_saved_with_them(tmp_path: Path) -> None:
    """On a model with tied embeddings: input and output rows stay one and the same."""
    model = adapted("random", trained=True, trainable_token_indices=[1, 2])
    delta = model.get_input_embeddings().token_adapter.trainable_tokens_delta["default"]
    with torch.no_grad():
        delta += 0.5
    expected = logits(model)
    assert not torch.equal(expected, logits(adapted("random", trained=True)))
    model.save_pretrained(str(tmp_path))
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).eval()), expected)
    plain = model.merge_and_unload()
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-4)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight


def test_tied_embeddings_can_be_trained_as_one(tmp_path: Path) -> None:
    model = adapted("random", trained=True, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    embedding = model.get_input_embeddings().modules_to_save["default"]
    head = model.base_model.model.lm_head.modules_to_save["default"]
    assert head.weight is embedding.weight
    with torch.no_grad():
        embedding.weight += 0.1
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).eval()
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("constructor", ["random", "fcca"])
def test_random_cores_change_an_untrained_model_and_zero_ones_do_not(constructor: str) -> None:
    base = logits(tiny_qwen2())
    assert torch.equal(logits(adapted(constructor)), base)
    model = adapted(constructor, init_weights=False)
    assert not torch.equal(logits(model), base)
    with pytest.raises(CalibrationError, match="Pass reset=True"):
        calibrate(model, BATCHES, progress=False)


def test_mixed_batches_work_on_conv1d() -> None:
    model = adapted("random", model=tiny_gpt2(), trained=True, target_modules=["c_attn", "c_proj"])
    with model.disable_adapter():
        base = logits(model)
    mixed = model(**PROMPT, adapter_names=["default", "__base__", "default", "__base__"]).logits
    torch.testing.assert_close(mixed[0::2], logits(model)[0::2], rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed[1::2], base[1::2])


def test_an_old_peft_is_refused_in_one_line() -> None:
    program = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '0.19.1' if name == 'peft' else real(name)\n"
        "import frozencore"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: frozencore needs peft 0.21 or newer, but 0.19.1 is installed" in done.stderr


def test_an_adapter_of_a_compiled_base_reloads_there_and_says_so_on_a_plain_one(tmp_path: Path) -> None:
    model = adapted("random", model=torch.compile(tiny_qwen2(), backend="eager"), trained=True)
    model.save_pretrained(str(tmp_path))
    compiled = PeftModel.from_pretrained(torch.compile(tiny_qwen2(), backend="eager"), str(tmp_path))
    assert torch.equal(logits(compiled.eval()), logits(model))
    with pytest.raises(ArtifactError, match="was added to a compiled model, there or here") as caught:
        PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path))
    assert "\n" not in str(caught.value)


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
