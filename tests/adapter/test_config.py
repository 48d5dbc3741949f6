"""The values that a configuration accepts, and the one line that refuses others."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model

from adapted import adapted, cores_of, logits
from frozencore import FrozenCoreConfig
from frozencore.adapter.config import INSTEAD_OF_LORA
from frozencore.errors import ArtifactError, ConfigError
from tiny import tiny_qwen2

pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constructor": "fca"}, "'fca'.*Did you mean 'fcca'"),
        ({"constructor": None}, "constructor"),
        ({"r": 0}, "rank must be a whole number from 1 to 100000, but 0 came"),
        ({"r": "16"}, "rank must be a whole number from 1 to 100000, but '16' came"),
        ({"rank_pattern": {"q_proj": -1}}, "rank must be a whole number from 1 to 100000, but -1 came"),
        ({"alpha": 0}, "alpha must be a number above 0 or one of auto or none, but 0 came"),
        ({"alpha": float("nan")}, "alpha must be a number above 0 or one of auto or none, but nan came"),
        ({"alpha": "r"}, "alpha must be a number above 0 or one of auto or none, but 'r' came"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha must be a number above 0 or one of auto or none, but 0 came"),
        ({"damping": 0}, "damping must be a number above 0 or a list of 2"),
        ({"damping": "1e-3"}, "damping must be a number above 0 or a list of 2"),
        ({"damping": [1e-3, -1.0]}, "damping must be a number above 0 or a list of 2"),
        ({"whiten": "left"}, "whiten must be one of both, input, output, none, but 'left' came"),
        ({"fisher": "block"}, "fisher must be one of diagonal, dense, but 'block' came"),
        ({"shrinkage": 0.5}, "needs fisher='dense'"),
        ({"shrinkage": 2, "fisher": "dense"}, "shrinkage must be a number from 0 to 1"),
        ({"coordinates": "polar"}, "coordinates must be one of fisher, qr, raw, scaled_raw, but 'polar' came"),
        ({"svd_method": "fast"}, "svd_method must be one of"),
        ({"constructor": "filora", "filora_fisher": "none"}, "filora_fisher must be one of"),
        ({"constructor": "eva", "eva_output": "none"}, "eva_output must be one of"),
        ({"initial_step": 0.1}, "'fcca' does not read initial_step .it is for signgrad.. Leave it out"),
        ({"constructor": "random", "damping": 0.1}, "'random' does not read damping .it is for fcca."),
        ({"layers_pattern": "layers"}, "layers_to_transform"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "`layers_to_transform` cannot be used when"),
        ({"target_modules": ".*q_proj", "layers_pattern": "layers"}, "`layers_pattern` cannot be used when"),
    ],
)
def test_bad_values_are_refused_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        FrozenCoreConfig(**options)
    assert "\n" not in str(caught.value)


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = FrozenCoreConfig(
        r=5, target_modules=["q_proj", "v_proj"], constructor="fcca", alpha=7.0, whiten="input", fisher="dense",
        shrinkage=0.25, damping=[1e-3, 0.1], coordinates="raw", svd_method="full", seed=4,
        rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 3.0}, exclude_modules=["layers.0.self_attn.q_proj"],
    )  # fmt: skip
    config.save_pretrained(str(tmp_path))
    loaded = PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(loaded, FrozenCoreConfig)
    assert loaded.load_bases
    assert {**loaded.to_dict()} == {**config.to_dict()}
    assert loaded.basis_options() == config.basis_options()


def test_the_scale_is_alpha_over_rank_16_over_it_by_default_and_one_without_alpha() -> None:
    def scales(**options: object) -> dict[str, float]:
        layers = cores_of(adapted("random", r=4, **options))
        return {layer.name.rsplit(".", 1)[-1]: layer.frozencore_scale["default"] for layer in layers}

    assert FrozenCoreConfig().alpha == "auto"
    assert set(scales(alpha="auto").values()) == {4.0}  # 16 / r
    assert set(scales(alpha=8.0).values()) == {2.0}
    assert set(scales(alpha=None).values()) == set(scales(alpha=None, rank_pattern={"q_proj": 2}).values()) == {1.0}
    patterned = scales(alpha=8.0, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 2.0})
    assert patterned == {"q_proj": 4.0, "k_proj": 2.0, "v_proj": 0.5, "o_proj": 2.0}


def test_patterns_layers_and_exclusions_choose_ranks_and_targets() -> None:
    model = adapted(
        "random", r=4, rank_pattern={"layers.1.self_attn.q_proj": 2}, exclude_modules=["o_proj"],
    )  # fmt: skip
    ranks = {layer.name: layer.frozencore_R["default"].weight.shape[0] for layer in cores_of(model)}
    assert ranks["model.layers.1.self_attn.q_proj"] == 2
    assert ranks["model.layers.0.self_attn.q_proj"] == 4
    assert not any("o_proj" in name for name in ranks)
    only = adapted("random", target_modules=["q_proj"], layers_to_transform=[1])
    assert [layer.name for layer in cores_of(only)] == ["model.layers.1.self_attn.q_proj"]


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    targets = ["v_proj", "q_proj", "k_proj", "o_proj"]
    for name, order in (("a", targets), ("b", targets[::-1])):
        FrozenCoreConfig(target_modules=order).save_pretrained(str(tmp_path / name))
    first, second = ((tmp_path / name / "adapter_config.json").read_bytes() for name in "ab")
    assert first == second


def test_a_configuration_alone_in_its_folder_is_read_without_weights(tmp_path: Path) -> None:
    FrozenCoreConfig(r=5, constructor="random", target_modules=["q_proj"]).save_pretrained(tmp_path)
    read = FrozenCoreConfig.from_pretrained(tmp_path)
    assert isinstance(read, FrozenCoreConfig)
    assert (read.r, read.constructor, read.target_modules) == (5, "random", {"q_proj"})


def test_the_configuration_of_another_method_is_read_as_peft_reads_it(tmp_path: Path) -> None:
    LoraConfig(r=5, target_modules=["q_proj"]).save_pretrained(tmp_path)
    assert FrozenCoreConfig.from_pretrained(tmp_path) == PeftConfig.from_pretrained(tmp_path)
    assert type(FrozenCoreConfig.from_pretrained(tmp_path)) is LoraConfig


def test_what_peft_refuses_in_our_configuration_names_the_file(tmp_path: Path) -> None:
    FrozenCoreConfig(constructor="random").save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "task_type": "HAIKU_LM"}))
    with pytest.raises(ArtifactError, match="HAIKU_LM") as caught:
        FrozenCoreConfig.from_pretrained(tmp_path)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_is_not_saved_into_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(AssertionError, match="should be a directory, not a file"):
        FrozenCoreConfig(constructor="random").save_pretrained(file)
    assert file.read_text() == "mine"


def test_a_configuration_that_is_saved_again_beside_its_weights_keeps_their_seal(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    model.save_pretrained(str(tmp_path))
    seal = json.loads((tmp_path / "adapter_config.json").read_text())["seal"]
    config = FrozenCoreConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["seal"] == seal
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path))), logits(model))


@pytest.mark.parametrize("name", INSTEAD_OF_LORA)
def test_loras_names_are_met_with_ours_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no '{name}', which is LoraConfig's: .*") as error:
        FrozenCoreConfig(r=4, **{name: 1})
    assert "\n" not in str(error.value)
    assert isinstance(error.value, TypeError)  # as Python's own of an unknown argument, by which PEFT asks
    assert name in signature(LoraConfig).parameters


@pytest.mark.parametrize(
    ("name", "ours"),
    [("method", "constructor"), ("rank", "r"), ("lora_r", "r"), ("targets", "target_modules"), ("dampin", "damping")],
)
def test_a_name_that_is_not_ours_gets_ours_in_one_line(name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"unexpected keyword argument '{name}'. Give {ours} instead") as error:
        FrozenCoreConfig(**{name: 1})
    assert "\n" not in str(error.value)
    assert "LoraConfig" not in str(error.value)


def test_targets_that_match_no_layer_are_met_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match="'q_prj' match no layer of this model. Did you mean 'q_proj'") as error:
        get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=2, constructor="random", target_modules=["q_prj"]))
    assert "down_proj, gate_proj, k_proj" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_signature_of_a_configuration_is_its_fields_and_peft_leaves_out_what_it_does_not_know(
    tmp_path: Path,
) -> None:
    by_name = {field.name for field in fields(FrozenCoreConfig) if field.init}
    assert set(signature(FrozenCoreConfig).parameters) == by_name
    assert set(signature(FrozenCoreConfig.__init__).parameters) == {"self", *by_name}  # where PEFT looks
    assert {"damping", "r", "alpha"} <= by_name
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_option'"):
        FrozenCoreConfig(no_such_option=1)
    config = FrozenCoreConfig(r=4, damping=0.5, target_modules=["q_proj"])
    assert replace(config, r=5).r == 5
    config.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_a_later_version": 1}))
    with pytest.warns(UserWarning, match="of_a_later_version"):
        read = PeftConfig.from_pretrained(str(tmp_path))
    assert (type(read), read.r, read.damping) == (FrozenCoreConfig, 4, 0.5)


def test_a_mixed_model_of_peft_refuses_a_frozen_core_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"'FROZENCORE' is not compatible with the `PeftMixedModel`") as error:
        get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=2, constructor="random"), mixed=True)
    assert "\n" not in str(error.value)
