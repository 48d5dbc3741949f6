"""Frozen cores as a PEFT method: saving, a fresh process, several adapters, disabling, deleting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import forked
from adapted import BATCHES, adapted, cores_of, logits, needs_own_integration, train_at_random
from frozencore import CONSTRUCTORS, FrozenCoreConfig, calibrate, export_merged
from frozencore.errors import CalibrationError
from tiny import tiny_qwen2

OTHER_PROCESS = """
import sys
from pathlib import Path
import frozencore
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

work = Path(sys.argv[1])
batch = torch.load(work / "batch.pt")
result = {}
for folder in sorted((work / "adapters").iterdir()):
    dtype = getattr(torch, folder.name.split("-")[1])
    for low_memory in (False, True):
        base = AutoModelForCausalLM.from_pretrained(work / "base", dtype=dtype)
        model = PeftModel.from_pretrained(base, str(folder), low_cpu_mem_usage=low_memory).eval()
        with torch.no_grad():
            result[f"{folder.name}/{low_memory}"] = model(**batch).logits
torch.save(result, work / "result.pt")
"""


@pytest.mark.parametrize(
    ("constructors", "fresh"), [(("fcca", "vera"), False), pytest.param(CONSTRUCTORS, True, marks=pytest.mark.slow)]
)
def test_adapters_reload_bit_equal_in_a_process_of_its_own(
    constructors: Collection[str], fresh: bool, tmp_path: Path
) -> None:
    """Every constructor, float32 and bf16, with and without PEFT's low_cpu_mem_usage; started anew, or forked."""
    tiny_qwen2().save_pretrained(tmp_path / "base")
    torch.save({key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}, tmp_path / "batch.pt")
    expected = {}
    for constructor in constructors:
        for dtype in (torch.float32, torch.bfloat16):
            # Loaded, not cast: model.to(bfloat16) would round the rotary frequencies as well.
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype).eval()
            plain = logits(base)
            model = adapted(constructor, model=base, dtype=None, trained=True, rank_pattern={"k_proj": 2}, alpha=5.0)
            name = f"{constructor}-{str(dtype).removeprefix('torch.')}"
            model.save_pretrained(str(tmp_path / "adapters" / name))
            expected[name] = logits(model)
            assert expected[name].dtype == dtype
            assert not torch.equal(expected[name], plain)
    (tmp_path / "load.py").write_text(OTHER_PROCESS)
    if fresh:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        done = subprocess.run(
            [sys.executable, tmp_path / "load.py", tmp_path], env=environment, capture_output=True, text=True
        )
        status, err = done.returncode, done.stderr
        assert not re.search(r"Failed to load|is an Enum subclass", err)  # torchao's, which nobody asked for
    else:
        ended = forked.ended(forked.script(tmp_path / "load.py", tmp_path), tmp_path)
        status, err = ended.status, ended.err
    assert status == 0, err
    found = torch.load(tmp_path / "result.pt")
    assert len(found) == 2 * len(expected) == 4 * len(constructors)
    for name, value in found.items():
        assert torch.equal(value, expected[name.partition("/")[0]]), name


def test_the_file_holds_the_factors_and_nothing_else(tmp_path: Path) -> None:
    model = adapted("fcca", dtype=torch.bfloat16, trained=True)
    model.save_pretrained(str(tmp_path))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 3 * 8
    for layer in cores_of(model):
        for key, factor in zip(("P", "Q", "R.weight"), layer.factors("default"), strict=True):
            saved = tensors[f"base_model.model.{layer.name}.frozencore_{key}"]
            assert saved.dtype == factor.dtype
            assert torch.equal(saved, factor)


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


@pytest.mark.parametrize("constructor", ["fcca", "random"])
def test_a_reloaded_core_is_not_recalibrated_without_reset(constructor: str, tmp_path: Path) -> None:
    adapted(constructor, trained=True).save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path), is_trainable=True)
    with pytest.raises(CalibrationError, match="Pass reset=True"):
        calibrate(loaded, BATCHES, progress=False)


def test_an_adapter_saved_before_calibration_asks_for_it_after_loading(tmp_path: Path) -> None:
    adapted("fcca", calibrated=False).save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path), is_trainable=True).train()
    with pytest.raises(CalibrationError, match="Call frozencore.calibrate"):
        loaded(**BATCHES[0])
    calibrate(loaded, BATCHES, progress=False)
    loaded(**BATCHES[0]).loss.backward()


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


def test_each_row_of_a_mixed_batch_goes_through_its_own_adapter() -> None:
    model = adapted("random", dtype=torch.float64, trained=True)
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="vera"))
    train_at_random(model, "other", seed=1)
    alone = {"default": logits(model)}
    model.set_adapter("other")
    alone["other"] = logits(model)
    with model.disable_adapter():
        alone["__base__"] = logits(model)
    names = ["other", "default", "__base__", "other"]
    inputs = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=names).logits
    for row, name in enumerate(names):
        torch.testing.assert_close(mixed[row], alone[name][row], rtol=1e-10, atol=1e-10)
    assert torch.equal(logits(model), alone["other"])  # the next batch is plain again


@needs_own_integration
def test_a_core_on_a_model_of_transformers_own_integration_can_be_calibrated() -> None:
    model = tiny_qwen2()
    model.add_adapter(FrozenCoreConfig(r=3, coordinates="qr"))
    calibrate(model, BATCHES, progress=False)
    for layer, other in zip(cores_of(model), cores_of(adapted("fcca")), strict=True):
        assert torch.equal(layer.factors("default")[0], other.factors("default")[0])


def test_only_the_active_adapter_is_trainable() -> None:
    model = adapted("random")
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="vera"))

    def trainable() -> set[str]:
        return {name.rsplit(".", 2)[-2] for name, p in model.named_parameters() if p.requires_grad}

    assert trainable() == {"default"}
    model.set_adapter("other")
    assert trainable() == {"other"}


def test_two_active_adapters_add_up_and_merge_together() -> None:
    model = adapted("random", dtype=torch.float64, trained=True)
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="vera"))
    train_at_random(model, "other", seed=1)
    deltas = [sum(layer.get_delta_weight(name) for name in ("default", "other")) for layer in cores_of(model, "other")]
    model.base_model.set_adapter(["default", "other"])
    expected = logits(model)
    dense = tiny_qwen2().double()
    with torch.no_grad():
        for layer, delta in zip(cores_of(model), deltas, strict=True):
            dense.get_submodule(layer.name).weight += delta
    torch.testing.assert_close(expected, logits(dense), rtol=1e-10, atol=1e-10)
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-10)


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


def test_adapters_are_saved_and_loaded_each_by_its_name(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="vera"))
    train_at_random(model, "other", seed=1)
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).eval()
    loaded.load_adapter(str(tmp_path / "other"), adapter_name="other")
    for name in ("default", "other"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        assert torch.equal(logits(loaded), logits(model))


def test_a_state_dict_moves_an_adapter_to_another_model() -> None:
    from peft import get_peft_model_state_dict

    model = adapted("fcca", trained=True)
    other = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=3, alpha=None)).eval()
    report = set_peft_model_state_dict(other, get_peft_model_state_dict(model))
    assert not report.unexpected_keys
    assert torch.equal(logits(other), logits(model))


def test_modules_to_save_are_trained_and_saved_with_the_adapter(tmp_path: Path) -> None:
    base = tiny_qwen2(tie_word_embeddings=False)
    model = adapted("random", model=base, trained=True, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight += 0.1
    model.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny_qwen2(tie_word_embeddings=False), str(tmp_path)).eval()
    assert torch.equal(logits(loaded), logits(model))


def test_an_adapter_converts_to_an_equal_lora() -> None:
    """PEFT's own conversion, through the dense update and its SVD: exact because the update has rank r."""
    from peft import convert_to_lora
    from peft.utils.save_and_load import set_peft_model_state_dict as set_state

    model = adapted("fcca", trained=True)
    config, state = convert_to_lora(model, rank=3)
    lora = get_peft_model(tiny_qwen2(), config).eval()
    set_state(lora, state)
    torch.testing.assert_close(logits(lora), logits(model), rtol=1e-4, atol=1e-4)
