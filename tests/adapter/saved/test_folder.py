"""A saved adapter is read as it was, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from frozencore import FrozenCoreConfig, frozen_core_layers
from frozencore.adapter.folders import read_adapter
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import LARGEST_CONFIG
from tiny import tiny_qwen2


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = FrozenCoreConfig(r=4, target_modules=["q_proj", "v_proj"], constructor="random", coordinates="qr")
    get_peft_model(tiny_qwen2(), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_factors_are_those_of_the_model(saved: Path) -> None:
    config = FrozenCoreConfig(r=4, target_modules=["q_proj", "v_proj"], constructor="random", coordinates="qr")
    model = get_peft_model(tiny_qwen2(), config)
    read, factors = read_adapter(saved)
    layers = frozen_core_layers(model, "default")
    assert factors.keys() == layers.keys()
    for name, layer in layers.items():
        for mine, theirs in zip(
            (factors[name].P, factors[name].Q, factors[name].R), layer.factors("default"), strict=True
        ):
            assert torch.equal(mine, theirs)
    assert (read.r, read.constructor, read.coordinates) == (4, "random", "qr")


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_one_of_the_files_is_refused(saved: Path, missing: str) -> None:
    (saved / missing).unlink()
    with pytest.raises(ArtifactError, match=f"has no {missing}"):
        read_adapter(saved)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_truncated_file_is_refused(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactError, match="damaged"):
        read_adapter(saved)


def test_a_configuration_that_is_no_object_is_refused(saved: Path) -> None:
    (saved / "adapter_config.json").write_text("[1]")
    with pytest.raises(ArtifactError, match="no JSON object"):
        read_adapter(saved)


def test_a_lora_is_refused_by_its_type(tmp_path: Path) -> None:
    get_peft_model(tiny_qwen2(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="LORA adapter"):
        read_adapter(tmp_path)


def test_a_layer_without_its_core_is_refused(saved: Path) -> None:
    tensors = load_file(saved / "adapter_model.safetensors")
    tensors.pop(next(key for key in tensors if "frozencore_R" in key))
    save_file(tensors, saved / "adapter_model.safetensors")
    with pytest.raises(ArtifactError, match="where P, Q and R are needed"):
        read_adapter(saved)


def test_unknown_options_of_a_later_version_do_not_stop_reading(saved: Path) -> None:
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_tomorrow": 1}))
    assert read_adapter(saved)[0].r == 4


def test_a_configuration_of_many_megabytes_is_refused_before_it_is_read(saved: Path) -> None:
    file = saved / "adapter_config.json"
    file.write_text(file.read_text() + " " * LARGEST_CONFIG)
    with pytest.raises(ArtifactError, match=r"adapter_config.json is larger than 16,777,216 bytes"):
        read_adapter(saved)


def test_weights_without_a_single_core_are_refused(saved: Path) -> None:
    save_file({"base_model.model.lm_head.weight": torch.ones(2, 2)}, saved / "adapter_model.safetensors")
    with pytest.raises(ArtifactError, match="holds no frozen core. Save the adapter again"):
        read_adapter(saved)
