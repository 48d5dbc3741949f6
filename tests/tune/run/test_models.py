"""Which layers a run adapts."""

from __future__ import annotations

import pytest
from torch import nn

from frozencore.errors import ConfigError
from frozencore.tune.methods import Targets, find_method
from frozencore.tune.run import models
from frozencore.tune.run.config import make_config
from frozencore.tune.run.models import load_model, resolve_targets


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), ("model.layers.1.mlp.up_proj",)])
def test_layers_that_are_named_and_there_are_adapted_as_they_were_named(targets: Targets, qwen2: nn.Module) -> None:
    assert resolve_targets(make_config(model="any", task="sst2", targets=targets), qwen2) == targets


def test_without_names_the_attention_projections_that_the_model_has_are_adapted(
    qwen2: nn.Module, gpt2: nn.Module
) -> None:
    unnamed = make_config(model="any", task="sst2")
    assert resolve_targets(unnamed, qwen2) == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert resolve_targets(unnamed, gpt2) == ("c_attn",)


def test_an_architecture_that_is_not_known_must_be_told_its_layers_and_they_are_listed(qwen2: nn.Module) -> None:
    qwen2.config.model_type = "mystery"
    with pytest.raises(ConfigError, match=r"of a 'mystery' model are not known .*--targets all-linear.*has: .*q_proj"):
        resolve_targets(make_config(model="any", task="sst2"), qwen2)


@pytest.mark.parametrize("targets", ["all-linear", None, ("q_proj", "down_proj"), ("model.layers.1.mlp.up_proj",)])
def test_the_last_blocks_alone_are_adapted_in_full_names(targets: Targets | None, qwen2: nn.Module) -> None:
    everywhere = make_config(model="any", task="sst2", method="lora", targets=targets)
    last = everywhere.model_copy(update={"layers": 1})
    found = resolve_targets(last, qwen2)
    assert all(name.startswith("model.layers.1.") for name in found)
    every = find_method("lora").add(qwen2, everywhere.adapter_options(resolve_targets(everywhere, qwen2)))
    adapted = {name for name, module in every.get_base_model().named_modules() if hasattr(module, "lora_A")}
    assert set(found) == {name for name in adapted if ".1." in name}


def test_several_processes_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "num_ranks", lambda: 2)
    with pytest.raises(ConfigError, match=r"own, but --device cuda:1 came for 2\. Use cuda\."):
        load_model("pocket", device="cuda:1")


def test_more_blocks_than_there_are_is_one_line(qwen2: nn.Module) -> None:
    config = make_config(model="any", task="sst2", layers=3)
    with pytest.raises(ConfigError, match="--layers 3 is more than the 2 blocks of this model"):
        resolve_targets(config, qwen2)
