"""Which layers a run adapts."""

from __future__ import annotations

import pytest
from torch import nn

from frozencore.errors import ConfigError
from frozencore.lab.methods import Targets
from frozencore.lab.run.config import make_config
from frozencore.lab.run.targets import resolve_targets


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
