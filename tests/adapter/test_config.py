"""The configuration: its file, scales, layers by name as PEFT matches them, and constructors of a user's own."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn

from families import make
from frozencore import FrozenCoreConfig, register_constructor, save_basis
from frozencore.constructors import CONSTRUCTORS, BasisOptions
from frozencore.errors import ConfigError
from tiny import TOY, Toy, ToyOptions, adapted, coordinates_from, cores_of, logits, register_toy, tiny_gpt2, tiny_qwen2

pytestmark = pytest.mark.usefixtures("as_a_user")


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


def test_the_configuration_of_another_method_is_read_as_peft_reads_it(tmp_path: Path) -> None:
    LoraConfig(r=5, target_modules=["q_proj"]).save_pretrained(tmp_path)
    assert FrozenCoreConfig.from_pretrained(tmp_path) == PeftConfig.from_pretrained(tmp_path)
    assert type(FrozenCoreConfig.from_pretrained(tmp_path)) is LoraConfig


def test_a_configuration_that_is_saved_again_beside_its_weights_is_the_same_bytes(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    model.save_pretrained(str(tmp_path))
    before = (tmp_path / "adapter_config.json").read_text()
    config = FrozenCoreConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").read_text() == before
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path))), logits(model))


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


def lora_names(model: nn.Module, **options: object) -> dict[str, int]:
    """The layers and ranks that PEFT's own LoRA chooses."""
    return {
        name.removeprefix("base_model.model."): module.r["default"]
        for name, module in get_peft_model(model, LoraConfig(r=3, **options)).named_modules()
        if hasattr(module, "lora_A")
    }


MODELS = {"qwen2": tiny_qwen2, "gpt2": tiny_gpt2, "t5": partial(make, "t5")}
CHOICES: dict[str, list[dict[str, object]]] = {
    "qwen2": [
        {"target_modules": r".*layers\.1\..*(q|v)_proj"},
        {"target_modules": r"^(?!.*layers\.0).*_proj$"},
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "exclude_modules": r".*mlp.*"},
        {"target_modules": "all-linear", "exclude_modules": r".*mlp.*", "rank_pattern": {r".*\.0\..*": 2}},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.0\..*q_proj"},
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*", "layers_to_transform": [0, 1]},
        {"target_modules": r".*self_attn.*proj", "exclude_modules": ["k_proj"]},
        {"target_modules": r".*(q_proj|lm_head)", "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {r"layers\.[0]\..*": 2, "v_proj": 4}},
        {"target_modules": ["q_proj"], "rank_pattern": {r"^model.layers.0.self_attn.q_proj": 2}},
        {"target_modules": ["q_proj"], "rank_pattern": {r"^layers.0.self_attn.q_proj": 2}},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 2}},
        {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2, "model.layers.0.self_attn.q_proj": 1}},
        {"target_modules": ["q_proj"], "rank_pattern": {"layers.0.self_attn.q.proj": 2, "model": 1}},
        {"target_modules": r"model\.layers\.0\.self_attn\.q_proj"},
        {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    ],
    "gpt2": [
        {"target_modules": r".*attn\.c_(attn|proj)"},
        {"target_modules": ["c_proj"], "exclude_modules": r".*\.mlp\..*"},
        {"target_modules": ["attn.c_proj"], "rank_pattern": {"attn.c_proj": 2, r".*h\.1\..*": 1}},
        {"target_modules": ["c_attn", "c_proj"], "rank_pattern": {r"h\.0\..*": 1, "c_attn": 2}},
        {"target_modules": r"(?i).*C_FC"},
    ],
    "t5": [
        {"target_modules": r"encoder\..*\.(q|v)"},
        {"target_modules": ["q", "v"], "exclude_modules": r"decoder.*"},
        {"target_modules": ["q"], "rank_pattern": {"SelfAttention.q": 2, "decoder.*q": 1}},
        {"target_modules": ["q"], "rank_pattern": {"decoder.*q": 1, "SelfAttention.q": 2}},
        {"target_modules": ["wi", "wo"], "layers_to_transform": [0], "layers_pattern": "block"},
    ],
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(("family", "options"), [(family, each) for family in CHOICES for each in CHOICES[family]])
def test_names_and_expressions_choose_the_layers_and_ranks_that_peft_chooses(
    family: str, options: dict[str, object]
) -> None:
    layers = cores_of(adapted("random", model=MODELS[family](), **options))
    assert {layer.name: len(layer.core("default")) for layer in layers} == lora_names(MODELS[family](), **options)


def test_what_is_saved_are_names_and_they_load(tmp_path: Path) -> None:
    model = adapted(
        "random", trained=True, target_modules=r".*layers\.1.*(q|v)_proj", rank_pattern={r".*v_.*": 2},
        alpha=4.0, alpha_pattern={r".*q_.*": 6.0},
    )  # fmt: skip
    model.save_pretrained(str(tmp_path))
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    q, v = (f"model.layers.1.self_attn.{side}_proj" for side in "qv")
    assert (values["target_modules"], values["exclude_modules"]) == ([q, v], None)
    assert (values["rank_pattern"], values["alpha_pattern"]) == ({v: 2}, {q: 6.0})
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).eval()
    assert logits(loaded).equal(logits(model))


@pytest.mark.parametrize("with_basis", [False, True])
def test_keys_of_a_pattern_that_name_a_layer_twice_mean_the_same_in_a_file(with_basis: bool, tmp_path: Path) -> None:
    pattern = {"q_proj": 2, "layers.0.self_attn.q_proj": 1}  # the first counts, but PEFT's file sorts them
    model = adapted("random", trained=True, alpha=4.0, alpha_pattern=pattern, rank_pattern=pattern)
    if with_basis:
        save_basis(model, tmp_path / "basis")
    model.save_pretrained(str(tmp_path))
    assert len(cores_of(model)[0].core("default")) == 2
    assert logits(PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).eval()).equal(logits(model))


@pytest.mark.parametrize("targets", [r".*q_proj", None, "all-linear"])
def test_a_model_keeps_its_configuration_and_another_model_gets_a_copy_as_it_was_given(targets: str | None) -> None:
    config = FrozenCoreConfig(r=2, constructor="random", target_modules=targets)
    first = get_peft_model(tiny_qwen2(), config)
    assert first.peft_config["default"] is config
    assert isinstance(config.target_modules, set)  # filled in
    config.calibration_tokens, config.r = 100, 3
    deeper = get_peft_model(tiny_qwen2(num_hidden_layers=3, layer_types=None), config)
    assert 2 * len(cores_of(deeper)) == 3 * len(cores_of(first))
    copied = deeper.peft_config["default"]
    assert (copied is config, copied.r, copied.calibration_tokens) == (False, 3, None)
    first.add_adapter("another", config)
    assert first.peft_config["another"] is not config


def test_a_configuration_of_a_refused_adapter_is_kept_by_the_next_model() -> None:
    config = FrozenCoreConfig(r=2, constructor="random", target_modules=["nowhere"])
    with pytest.raises(ConfigError, match="nowhere"):
        get_peft_model(tiny_qwen2(), config)
    config.target_modules = ["q_proj"]
    assert get_peft_model(tiny_qwen2(), config).peft_config["default"] is config


# ------------------------------------------------------------------------------------- constructors of a user's own


def test_its_bases_are_built_as_its_option_says_and_survive_their_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="toy_offset"):
        FrozenCoreConfig(constructor_options={"toy_offset": 1})
    register_toy(monkeypatch)
    offset = {"toy_offset": 2}
    config = FrozenCoreConfig(r=4, target_modules=["q_proj"], constructor="toy", constructor_options=offset)
    model = get_peft_model(tiny_qwen2(), config)
    for layer in cores_of(model):
        P, Q, _ = layer.factors("default")
        assert torch.equal(P, coordinates_from(2, len(P), 4))
        assert torch.equal(Q, coordinates_from(2, len(Q), 4))
    model.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["constructor_options"] == offset
    loaded = PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).peft_config["default"]
    assert (loaded.constructor, loaded.basis_options(4)) == ("toy", ToyOptions(r=4, toy_offset=2))
    save_basis(model, tmp_path / "basis")
    assert FrozenCoreConfig(basis=str(tmp_path / "basis")).basis_options() == ToyOptions(r=4, toy_offset=2)
    for constructor, value in (("toy", 9), ("fcca", 1)):
        with pytest.raises(ConfigError, match="toy_offset"):
            FrozenCoreConfig(constructor=constructor, constructor_options={"toy_offset": value})
    with pytest.raises(ConfigError, match="damping"):
        FrozenCoreConfig(constructor="toy", damping=0.1)


def test_an_adapter_of_a_constructor_that_is_not_registered_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register_toy(monkeypatch)
    offset = {"toy_offset": 2}
    config = FrozenCoreConfig(r=4, target_modules=["q_proj"], constructor="toy", constructor_options=offset)
    get_peft_model(tiny_qwen2(), config).save_pretrained(str(tmp_path))
    monkeypatch.delitem(CONSTRUCTORS, "toy")
    with pytest.raises(ConfigError, match=r"no constructor 'toy'.*register_constructor"):
        PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path))


@dataclasses.dataclass
class OtherDamping(BasisOptions):
    damping: Annotated[int, "Something else."] = 3


@dataclasses.dataclass
class Alpha(BasisOptions):
    alpha: float = 1.0


@pytest.mark.parametrize(
    ("name", "options", "taken"),
    [("fcca", ToyOptions, "fcca"), ("other", OtherDamping, "damping"), ("other", Alpha, "alpha")],
)
def test_a_name_that_means_something_already_is_refused(name: str, options: type, taken: str) -> None:
    before, row = dict(CONSTRUCTORS), Toy()
    row.options = options
    with pytest.raises(ConfigError, match=f"'{taken}' is taken"):
        register_constructor(name, row)
    assert before == CONSTRUCTORS


def test_a_class_in_place_of_a_constructor_is_refused() -> None:
    with pytest.raises(ConfigError, match="A constructor is an instance of a subclass .*Toy'> was given"):
        register_constructor("toy", Toy)  # type: ignore[arg-type]


def test_two_constructors_may_read_one_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONSTRUCTORS, "again", TOY)
    del CONSTRUCTORS["again"]
    register_toy(monkeypatch)
    register_constructor("again", TOY)
    assert FrozenCoreConfig(constructor="again", constructor_options={"toy_offset": 1}).basis_options() == ToyOptions(
        toy_offset=1
    )
    with pytest.raises(ConfigError, match=r"it is for toy, again"):
        FrozenCoreConfig(constructor="eva", constructor_options={"toy_offset": 1})
