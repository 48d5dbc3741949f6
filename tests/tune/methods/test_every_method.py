"""The properties in each row of the method table hold on a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adapted import BATCHES
from frozencore import calibrate, frozen_core_layers, get_bases
from frozencore.errors import ConfigError
from frozencore.tune.methods import METHODS, AdapterOptions, find_method
from tiny import ATTENTION, tiny_qwen2

EVERY = pytest.mark.parametrize("name", METHODS)
OPTIONS = AdapterOptions(rank=3, targets=ATTENTION, seed=1, core={})
CALLED = {
    "core": ("frozencore_R",), "factors": ("lora_A", "lora_B"), "magnitudes": ("magnitude",),
    "weights": ("modules_to_save",),
}  # fmt: skip


@EVERY
def test_it_trains_the_kinds_of_values_that_its_row_names(name: str) -> None:
    model = METHODS[name].add(tiny_qwen2(), OPTIONS)
    trainable = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    kinds = [kind for key in trainable for kind, words in CALLED.items() if any(word in key for word in words)]
    assert len(kinds) == len(trainable) > 0
    assert set(kinds) == set(METHODS[name].trains)


@EVERY
def test_the_weights_of_the_base_are_changed_by_the_methods_that_say_so(name: str) -> None:
    model = tiny_qwen2()
    weights = dict(model.named_parameters())
    before = {key: parameter.clone() for key, parameter in weights.items()}
    METHODS[name].add(model, OPTIONS)
    assert all(torch.equal(weights[key], before[key]) for key in before) != METHODS[name].changes_base


@EVERY
def test_a_phase_before_training_is_had_by_those_that_look_at_data_or_weights_in_it(name: str) -> None:
    assert METHODS[name].initialises == (METHODS[name].has_bases or name == "pissa")


@EVERY
def test_moments_are_wanted_by_methods_whose_bases_wait_for_them(name: str) -> None:
    method = METHODS[name]
    model = method.add(tiny_qwen2(), OPTIONS)
    layers = frozen_core_layers(model, "default")
    assert bool(layers) == method.has_bases
    waiting = [name for name, layer in layers.items() if not bool(layer.factors("default")[0].any())]
    assert len(waiting) == (len(layers) if method.needs(OPTIONS) else 0)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.has_bases])
def test_bases_of_weights_alone_are_the_same_for_all_seeds_and_can_be_handed_on(name: str) -> None:
    method, other = METHODS[name], replace(OPTIONS, seed=2)
    found = []
    for options in (OPTIONS, other):
        model = method.add(tiny_qwen2(), options)
        if method.needs(options):
            calibrate(model, BATCHES[: options.seed], progress=False)
        found.append(get_bases(model))
    assert all(torch.equal(basis, found[1][key]) for key, basis in found[0].items()) == method.weights_only
    if method.weights_only:
        model = method.add(tiny_qwen2(), other, found[0])
        assert all(torch.equal(basis, found[0][key]) for key, basis in get_bases(model).items())
        assert not model.peft_config["default"].load_bases


def test_an_unknown_method_is_one_line_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"There is no method 'disa'. Did you mean 'pissa'\? Known: .*fcca.*lora"):
        find_method("disa")
