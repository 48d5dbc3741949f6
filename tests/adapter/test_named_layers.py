"""The naming of layers: PEFT's own matching is the reference, and a saved expression is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import get_pattern_key

from adapted import adapted, cores_of, logits
from frozencore import FrozenCoreConfig
from frozencore.adapter.named_layers import key_for
from frozencore.errors import ConfigError
from frozencore.tune.evaluation.adapters import BaseWithAdapter
from tiny import tiny_qwen2


def adapted_names(**options: object) -> dict[str, tuple[int, float]]:
    layers = cores_of(adapted("random", **options))
    return {layer.name: (len(layer.core("default")), layer.frozencore_scale["default"]) for layer in layers}


def lora_names(**options: object) -> dict[str, int]:
    """The layers and ranks that PEFT's own LoRA chooses."""
    model = get_peft_model(tiny_qwen2(), LoraConfig(r=3, **options))
    return {
        name.removeprefix("base_model.model."): module.r["default"]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": r".*layers\.1\..*(q|v)_proj"},
        {"target_modules": r"^(?!.*layers\.0).*_proj$"},
        {"target_modules": "all-linear", "exclude_modules": r".*mlp.*"},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.0\..*q_proj"},
        {"target_modules": r".*self_attn.*proj", "exclude_modules": ["k_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {r"layers\.[0]\..*": 2, "v_proj": 4}},
        {"target_modules": ["q_proj"], "rank_pattern": {r"^model.layers.0.self_attn.q_proj": 2}},
        {"target_modules": ["q_proj"], "rank_pattern": {r"^layers.0.self_attn.q_proj": 2}},
    ],
)
def test_expressions_choose_the_layers_and_ranks_that_peft_chooses(options: dict[str, object]) -> None:
    assert {name: rank for name, (rank, _) in adapted_names(**options).items()} == lora_names(**options)


PIECES = st.lists(st.sampled_from(["model", "layers", "0", "1", "q_proj", "k_proj", "a"]), min_size=1, max_size=4)


@given(st.lists(PIECES, max_size=4), PIECES)
def test_names_are_compared_as_peft_compares_them(keys: list[list[str]], layer: list[str]) -> None:
    pattern = {".".join(key): number for number, key in enumerate(keys)}
    name = ".".join(layer)
    found = key_for(pattern, name, "rank_pattern")
    peft = get_pattern_key(list(pattern), name)
    if name in pattern:
        assert found == name  # a layer's full name goes before an end that others have too
    else:
        assert found == (peft if peft in pattern else None)


def test_a_layer_that_only_ends_like_a_chosen_one_is_not_adapted() -> None:
    names = adapted_names(target_modules=r"model\.layers\.0\.self_attn\.q_proj")
    assert list(names) == ["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize("expression", ["(", "a{99999999999}", "(" * 9000 + ")" * 9000])
def test_malformed_and_huge_expressions_are_refused_when_they_are_given(expression: str) -> None:
    for options in ({"target_modules": expression}, {"rank_pattern": {expression: 2}}):
        with pytest.raises(ConfigError) as refused:
            FrozenCoreConfig(**options)
        assert len(str(refused.value)) < 500


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


def test_a_configuration_that_is_used_again_starts_from_its_expression() -> None:
    config = FrozenCoreConfig(r=2, constructor="random", target_modules=r".*q_proj")
    get_peft_model(tiny_qwen2(), config)
    deeper = get_peft_model(tiny_qwen2(num_hidden_layers=3, layer_types=None), config)
    assert len(cores_of(deeper)) == 3


@pytest.fixture(scope="module")
def saved_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    adapted("random", trained=True, target_modules=["q_proj", "v_proj"]).save_pretrained(str(folder))
    return folder


def test_evaluation_names_the_layers_of_any_adapter_that_peft_loads(saved_adapter: Path, tmp_path: Path) -> None:
    lora = get_peft_model(tiny_qwen2(), LoraConfig(r=2, target_modules=r".*(q|v)_proj", init_lora_weights=False))
    lora.save_pretrained(str(tmp_path / "lora"))
    want = logits(PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path / "lora")).eval())
    base = BaseWithAdapter(tiny_qwen2())
    for folder in (tmp_path / "lora", saved_adapter, tmp_path / "lora"):
        worn = logits(base.with_adapter(folder))
        assert worn.equal(want) == (folder != saved_adapter)
