"""The properties of each row of the method table hold on a model, and its adapter reloads on the base model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn

from frozencore import basis_id, calibrate, frozen_core_layers, get_basis
from frozencore.adapter.swap import round_core
from frozencore.errors import ArtifactError, ConfigError
from frozencore.tune.adapters import add_adapter, keep_start, save_adapter
from frozencore.tune.methods import METHODS, MethodConfig, find_method
from frozencore.tune.scoring.forward import unload_adapter
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import ATTENTION, BATCHES, VOCABULARY, draw_rows, same_tensors, tiny_qwen2

EVERY = pytest.mark.parametrize("name", METHODS)
OPTIONS = MethodConfig(r=3, target_modules=ATTENTION, seed=1)
CALLED = {
    "core": ("frozencore_R",), "factors": ("lora_A", "lora_B"), "magnitudes": ("magnitude",),
    "weights": ("modules_to_save",),
}  # fmt: skip


@EVERY
def test_it_trains_the_kinds_of_values_that_its_row_names(name: str) -> None:
    model = add_adapter(METHODS[name], tiny_qwen2(), OPTIONS)
    trainable = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    kinds = [kind for key in trainable for kind, words in CALLED.items() if any(word in key for word in words)]
    assert len(kinds) == len(trainable) > 0
    assert set(kinds) == set(METHODS[name].trains)


@EVERY
def test_the_weights_of_the_base_are_changed_by_the_methods_that_say_so(name: str) -> None:
    model = tiny_qwen2()
    weights = dict(model.named_parameters())
    before = {key: parameter.clone() for key, parameter in weights.items()}
    add_adapter(METHODS[name], model, OPTIONS)
    assert all(torch.equal(weights[key], before[key]) for key in before) != METHODS[name].changes_base


@EVERY
def test_moments_are_wanted_by_methods_whose_bases_wait_for_them(name: str) -> None:
    method = METHODS[name]
    model = add_adapter(method, tiny_qwen2(), OPTIONS)
    layers = frozen_core_layers(model, "default")
    assert bool(layers) == method.has_bases
    waiting = [name for name, layer in layers.items() if not bool(layer.factors("default")[0].any())]
    assert len(waiting) == (len(layers) if method.needs(OPTIONS) else 0)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.has_bases])
def test_bases_of_weights_alone_are_the_same_for_all_seeds_and_can_be_handed_on(name: str) -> None:
    method, other = METHODS[name], replace(OPTIONS, seed=2)
    found = []
    for options in (OPTIONS, other):
        model = add_adapter(method, tiny_qwen2(), options)
        if method.needs(options):
            calibrate(model, BATCHES[: options.seed], progress=False)
        found.append(get_basis(model))
    assert (found[0].id == found[1].id) == method.weights_only
    if method.weights_only:
        model = add_adapter(method, tiny_qwen2(), other, found[0].layers)
        assert basis_id(model) == found[0].id
        assert not model.peft_config["default"].load_bases


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 15).reshape(2, 6) % VOCABULARY).logits


@EVERY
def test_untrained_it_is_the_base_model_and_trained_it_reloads_on_it(name: str, tmp_path: Path) -> None:
    method, base, start = METHODS[name], tiny_qwen2(), tmp_path / "start"
    expected, original = logits(base), copy.deepcopy(base.state_dict())
    model = add_adapter(method, tiny_qwen2(), OPTIONS)
    if method.needs(OPTIONS):
        calibrate(model, BATCHES, progress=False)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-4)
    keep_start(method, model, start)
    rows = draw_rows(8, seed=5)
    train(model, rows, Recipe(learning_rate=3e-2, warmup=0.03, epochs=4), pad_id=0)
    trained = logits(model)
    assert (trained - expected).abs().max() > 1e-2
    save_adapter(method, model, tmp_path / "adapter", start)
    assert torch.equal(logits(model), trained)
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(reloaded), trained, atol=1e-5, rtol=1e-4)
    bare = unload_adapter(reloaded).state_dict()
    assert same_tensors(bare, original)


def test_no_space_for_temporary_files_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = add_adapter(METHODS["random"], tiny_qwen2(), OPTIONS)
    core = round_core(model, 8)
    monkeypatch.setattr(PeftModel, "save_pretrained", Mock(side_effect=SafetensorError("No space left on device")))
    with pytest.raises(ArtifactError, match="adapter cannot be written: No space left on device"):
        save_adapter(METHODS["random"], model, tmp_path / "adapter", tmp_path / "start", core)


@EVERY
def test_the_same_seed_gives_the_same_values_and_leaves_the_global_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, again = (add_adapter(METHODS[name], tiny_qwen2(), OPTIONS).state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same_tensors(first, again)


def test_targets_that_are_not_there_are_one_line() -> None:
    options = MethodConfig(r=4, target_modules=("nowhere",), seed=0)
    with pytest.raises(ConfigError, match="targets .*nowhere.* cannot carry LoRA"):
        add_adapter(METHODS["lora"], tiny_qwen2(), options)


def test_an_unknown_method_is_one_line_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"There is no method 'disa'. Did you mean 'pissa'\? Known: .*fcca.*lora"):
        find_method("disa")
