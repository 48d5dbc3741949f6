"""Which axis of a layer's input is the rows, and until when: models without tokens, other axes, checkpointed passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, SwinConfig, ViTConfig

from families import make
from frozencore import CoreBank, get_core
from frozencore.adapter.per_row import adapter_of_each_row
from frozencore.errors import ConfigError
from tiny import BATCHES, adapted, on_one_basis, on_two_bases

ROWS = ["a", "__base__", "b", "a"]


def tiny_vit(kind: str) -> nn.Module:
    """A model of images; it reads no tokens."""
    torch.manual_seed(0)
    if kind == "vit":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
        config: Any = ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3, initializer_range=0.5)
    else:
        sizes = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2}
        config = SwinConfig(**sizes, image_size=8, patch_size=2, num_labels=3, initializer_range=0.5)
    return AutoModelForImageClassification.from_config(config).eval()


def two_adapters(base: nn.Module, **options: object) -> PeftModel:
    return on_two_bases(base, {"r": 3, "constructor": "random"}, **options)


@pytest.mark.parametrize("case", ["images", "a plain module with a trained copy"])
@torch.no_grad()
def test_rows_of_a_model_that_reads_no_tokens_are_its_own_adapters(case: str) -> None:
    if case == "images":
        model, images = two_adapters(tiny_vit("vit"), target_modules="all-linear"), torch.randn(4, 3, 8, 8)
        call = lambda **more: model(pixel_values=images, **more).logits  # noqa: E731
    else:
        base = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        model = two_adapters(base, target_modules=["0"], modules_to_save=["2"])
        call = partial(model, torch.randn(4, 6))
    mixed = call(adapter_names=ROWS)
    for row, name in enumerate(ROWS):
        model.set_adapter("a" if name == "__base__" else name)
        with model.disable_adapter() if name == "__base__" else nullcontext():
            torch.testing.assert_close(mixed[row], call()[row], rtol=1e-4, atol=1e-5)


class Routed(nn.Module):
    """A model of two experts, each for the tokens of one parity."""

    def __init__(self, named: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.named = named
        self.add_module(named, nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.get_submodule(self.named)):
            mine = input_ids % 2 == i
            y[mine] = expert(x[mine])
        return y


class TokensFirst(nn.Module):
    """A layer that reads tokens before rows, in a model that reads no token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class OddTokens(nn.Module):
    """A layer that no pass of a plain row reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.odd = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.odd(x) if bool((input_ids == 7).all()) else x


EIGHT = {"input_ids": torch.full((8, 8), 7)}
OTHER_AXES: dict[str, Callable[[], tuple[PeftModel, dict[str, Tensor]]]] = {
    "windows of tokens": lambda: (two_adapters(make("longformer")), EIGHT),
    "tokens first": lambda: (two_adapters(make("xlnet"), target_modules=["layer_1"]), EIGHT),
    "tokens first, two of them": lambda: (
        two_adapters(TokensFirst(), target_modules=["layer"]),
        {"x": torch.randn(8, 2, 8)},
    ),
    "windows of an image": lambda: (
        two_adapters(tiny_vit("swin"), target_modules=["q_proj"]),
        {"pixel_values": torch.randn(8, 3, 8, 8)},
    ),
    "an expert": lambda: (
        two_adapters(Routed("experts"), target_modules=["experts.0", "experts.1"]),
        {"input_ids": torch.tensor([[7], *[[6]] * 7])},
    ),
    "never seen": lambda: (two_adapters(OddTokens(), target_modules=["odd"]), EIGHT),
}


@pytest.mark.parametrize("case", OTHER_AXES)
def test_a_batch_whose_first_axis_is_not_known_to_be_the_rows_is_refused(case: str) -> None:
    model, batch = OTHER_AXES[case]()
    bank = CoreBank(model, 1, adapter_name="a")
    bank.put("x", get_core(model, "a"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="is not known to be"):
            model(**batch, adapter_names=["a", "b"] * 4)
        with pytest.raises(ConfigError, match="is not known to be"), bank.rows(["x"] * 8):
            model(**batch)
    model(**batch)  # a plain batch runs


def test_the_pass_that_finds_the_first_axis_leaves_random_numbers_and_modes_as_they_were() -> None:
    model = adapted("fcca").train()
    model.model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    with CoreBank(model, 1).rows([None] * 4):
        assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_computes_again_with_the_same_cores_or_not_at_all(use_reentrant: bool) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = on_one_basis("a", "b").train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("frozencore_R" in name)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        with adapter_of_each_row(model, ROWS):
            model(**BATCHES[0]).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-5, atol=1e-7)
    loss = model(**BATCHES[0], adapter_names=ROWS).loss
    with pytest.raises(ConfigError, match=r"bank.rows\(\.\.\.\)"):
        loss.backward()
    bank = CoreBank(model, 1, adapter_name="a")
    with bank.rows([None] * 4):
        loss = model(**BATCHES[0]).loss
    with pytest.raises(ConfigError, match=r"bank.rows\(\.\.\.\)"), bank.rows([None] * 4):
        loss.backward()
    model.set_adapter("a")
    loss = model(**BATCHES[0]).loss
    with model.disable_adapter(), torch.no_grad():  # as DPO's reference
        model(**BATCHES[0])
    loss.backward()
    loss = model(**BATCHES[0]).loss
    model.set_adapter("b")
    with pytest.raises(ConfigError, match="other adapters are active"):
        loss.backward()
    model(**BATCHES[0]).loss.backward()  # a plain step goes on
