"""A calibration pass leaves the model and every RNG as it found them, also when it ends early."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from frozencore.calibration.collect import collect_moments
from frozencore.calibration.preserve import own_random_state, without_randomness
from tiny import attention_names, batches_of, draw_examples, tiny_gpt2, tiny_qwen2

BATCHES = batches_of(draw_examples(6, seed=1), 2)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
         "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")  # fmt: skip


def untidy(model: nn.Module, checkpointing: dict[str, bool] | None) -> nn.Module:
    """A model in the middle of other work: mixed modes and flags, gradients, hooks, checkpointing."""
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    blocks = model.model.layers if hasattr(model, "model") else model.transformer.h
    blocks[1].eval()
    parameters = list(model.parameters())
    for index, parameter in enumerate(parameters):
        parameter.requires_grad_(index % 3 != 0)
        if index % 2 and parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, float(index))
    blocks[0].register_forward_hook(lambda *_: None)
    blocks[0].register_forward_pre_hook(lambda *_: None)
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    plain = int | float | str | bool | type(None)
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            (name, kind): list(getattr(module, kind)) for name, module in model.named_modules() for kind in HOOKS
        },
        "numbers": {
            name: {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, plain) and key != "_is_full_backward_hook"  # torch's note that there once was one
            }
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "flags": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "identities": {name: id(parameter) for name, parameter in model.named_parameters()},
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
    }


def tensors(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.clone() for name, tensor in model.state_dict().items()} | gradients


def random_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()


def data(model: nn.Module, where: str, error: type[BaseException]) -> Iterator[dict[str, Tensor]]:
    """Batches, of which the second ends the pass: in the data, or in the forward or backward pass of a layer."""

    def interrupt(*_: Any) -> None:
        raise error("in the middle")

    yield BATCHES[0]
    if where == "the data":
        random.random(), np.random.rand(), torch.rand(())
        interrupt()
    layer = model.get_submodule(attention_names(model)[3] if hasattr(model, "model") else "transformer.h.0.mlp.c_fc")
    hooks = {"forward": layer.register_forward_pre_hook, "backward": layer.register_full_backward_hook}
    handle = hooks[where](interrupt) if where in hooks else None
    try:
        yield from BATCHES[1:]
    finally:
        if handle is not None:
            handle.remove()


ENDINGS = [
    ("nowhere", RuntimeError), ("the data", RuntimeError), ("the data", KeyboardInterrupt),
    ("forward", RuntimeError), ("forward", KeyboardInterrupt), ("backward", ValueError),
]  # fmt: skip


@pytest.mark.usefixtures("as_a_user")  # beartype draws from Python's RNG
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize(("where", "error"), ENDINGS)
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_gpt2])
def test_everything_is_as_before(
    make: Callable[[], nn.Module], where: str, error: type[BaseException], checkpointing: dict | None
) -> None:
    model = untidy(make(), checkpointing)
    names = attention_names(model) or ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"]
    state, values, states = snapshot(model), tensors(model), random_states()
    batches = data(model, where, error)
    with nullcontext() if where == "nowhere" else pytest.raises(error, match="in the middle"):
        collect_moments(model, batches, names)
    batches.close()
    after = random_states()
    assert after[0] == states[0]
    assert after[1] == states[1]
    assert torch.equal(after[2], states[2])
    new_state = snapshot(model)
    for part, expected in state.items():
        assert new_state[part] == expected, part
    new_values = tensors(model)
    assert new_values.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(new_values[name], value), name


def test_the_random_state_of_every_gpu_is_restored_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {device: torch.zeros(1) for device in range(2)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    before = dict(states)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with own_random_state():
            states.update(dict.fromkeys(states, torch.ones(1)))
    assert states == before


RATE = 0.5
SMALL = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = {"d_model": 16, "ffn_dim": 24, "attention_heads": 2, "num_layers": 3, "word_embed_proj_dim": 16}
BART = {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in
        (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip
WITH_RATES: dict[str, dict[str, Any]] = {
    "opt": {**DECODER, "dropout": RATE, "layerdrop": RATE},
    "biogpt": {"hidden_dropout_prob": RATE, "activation_dropout": RATE, "layerdrop": RATE},
    "xglm": {**DECODER, "dropout": RATE, "activation_dropout": RATE, "layerdrop": RATE},
    "falcon": {"hidden_dropout": RATE, "attention_dropout": RATE},
    "bloom": {"n_layer": 2, "n_head": 2, "hidden_dropout": RATE, "attention_dropout": RATE},
    "doge": {"hidden_dropout": RATE},
    "llama": {"attention_dropout": RATE},
    "bart": {**BART, "d_model": 16, "dropout": RATE, "decoder_layerdrop": RATE},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 1, "router_jitter_noise": 0.1},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": RATE},
    "phimoe": {"num_local_experts": 4, "num_key_value_heads": 1, "router_jitter_noise": 9.0},  # any expert may be drawn
}


@pytest.mark.parametrize("kind", WITH_RATES)
def test_plain_passes_a_training_pass_is_an_evaluation_pass(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SMALL | WITH_RATES[kind])))
    ids = torch.randint(3, 40, (2, 8))

    def logits() -> Tensor:
        return model(input_ids=ids)[0]

    wanted, before = model.eval()(input_ids=ids)[0], snapshot(model.train())
    assert not torch.equal(logits(), logits())
    with without_randomness(model):
        model.train()  # as a trainer does in each step
        first, second = logits(), logits()
    assert torch.equal(first, second)
    torch.testing.assert_close(first, wanted)
    assert snapshot(model) == before
