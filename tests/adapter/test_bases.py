"""Bases taken out and put in: the same adapter without a second calibration, or a refusal that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapted import BATCHES, adapted, cores_of, logits, train_at_random
from frozencore import CONSTRUCTORS, FrozenCoreConfig, get_bases, set_bases
from frozencore.errors import CalibrationError, ConfigError, FrozenCoreError
from tiny import tiny_qwen2

Bases = dict[str, Tensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_bases_of_a_file_make_the_same_adapter(constructor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = adapted(constructor, dtype=dtype)
    save_file(get_bases(expected), tmp_path / "bases.safetensors")
    model = adapted(constructor, dtype=dtype, calibrated=False)
    set_bases(model, load_file(tmp_path / "bases.safetensors"))
    for layer, other in zip(cores_of(model), cores_of(expected), strict=True):
        for mine, theirs in zip(layer.factors("default"), other.factors("default"), strict=True):
            assert torch.equal(mine, theirs)
    model.train()(**BATCHES[0]).loss.backward()


def test_keys_are_layer_names_and_values_are_copies() -> None:
    model = adapted("fcca")
    bases = get_bases(model)
    assert bases.keys() == {f"{layer.name}.{side}" for layer in cores_of(model) for side in "PQ"}
    bases["model.layers.0.self_attn.q_proj.P"].zero_()
    assert get_bases(model)["model.layers.0.self_attn.q_proj.P"].any()


def test_each_adapter_has_its_own() -> None:
    model = adapted("fcca")
    model.add_adapter("other", FrozenCoreConfig(r=3))
    with pytest.raises(CalibrationError, match="of adapter 'other' has none"):
        get_bases(model, "other")
    set_bases(model, get_bases(model), adapter_name="other")
    assert all(torch.equal(X, get_bases(model, "other")[key]) for key, X in get_bases(model).items())


def test_a_trained_core_is_kept_unless_it_is_given_up() -> None:
    model = adapted("fcca", trained=True)
    bases, before = get_bases(adapted("random")), logits(model)
    with pytest.raises(CalibrationError, match="Pass reset=True"):
        set_bases(model, bases)
    assert torch.equal(logits(model), before)
    set_bases(model, bases, reset=True)
    assert torch.equal(logits(model), logits(tiny_qwen2()))
    train_at_random(model)
    expected = adapted("random", trained=True)
    assert torch.equal(logits(model), logits(expected))


def test_the_card_no_longer_counts_the_tokens_of_another_calibration() -> None:
    model = adapted("fcca")
    assert model.peft_config["default"].calibration_tokens is not None
    set_bases(model, get_bases(adapted("random")))
    assert model.peft_config["default"].calibration_tokens is None


LAST = "model.layers.1.self_attn.o_proj"
WRONG: dict[str, tuple[Callable[[Bases], object], str]] = {
    "missing": (lambda b: b.pop(f"{LAST}.Q"), f"1 of 16 bases are missing \\(first: '{LAST}.Q'\\)"),
    "unknown": (lambda b: b.update({"lm_head.P": torch.eye(3)}), "1 of 16 bases fit no layer \\(first: 'lm_head.P'\\)"),
    "other rank": (lambda b: b.update({f"{LAST}.P": b[f"{LAST}.P"][:, :2]}), "Use the rank of the adapter"),
    "vector": (lambda b: b.update({f"{LAST}.P": b[f"{LAST}.P"][0]}), "a basis is a matrix of floats"),
    "integers": (lambda b: b.update({f"{LAST}.P": b[f"{LAST}.P"].long()}), "a basis is a matrix of floats"),
    "NaN": (lambda b: b[f"{LAST}.Q"].fill_(torch.nan), "NaN or Inf"),
    "scaled": (lambda b: b[f"{LAST}.Q"].mul_(1.01), "coordinates='qr' a basis is orthonormal, but that of layer"),
    "zero": (lambda b: b[f"{LAST}.P"].zero_(), "orthonormal"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_bases_are_refused_in_one_line_and_none_is_set(case: str) -> None:
    change, message = WRONG[case]
    bases = get_bases(adapted("fcca", coordinates="qr"))
    change(bases)
    model = adapted("fcca", coordinates="qr", calibrated=False)
    with pytest.raises(CalibrationError, match=f"(?i){message}") as caught:
        set_bases(model, bases)
    assert "\n" not in str(caught.value)
    assert not any(bool(factor.any()) for layer in cores_of(model) for factor in layer.factors("default"))


def test_raw_coordinates_promise_no_orthonormality() -> None:
    bases = get_bases(adapted("fcca", coordinates="raw"))
    set_bases(adapted("fcca", coordinates="raw", calibrated=False), bases)
    with pytest.raises(CalibrationError, match="same coordinates"):
        set_bases(adapted("fcca", coordinates="qr", calibrated=False), bases)


def test_what_bases_cannot_give_is_refused() -> None:
    bases = get_bases(adapted("signgrad"))
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: set_bases(adapted("signgrad", calibrated=False, initial_step=0.1), bases), "moments collected once"),
        (lambda: set_bases(tiny_qwen2(), bases), "get_peft_model"),
        (lambda: get_bases(get_peft_model(tiny_qwen2(), LoraConfig(target_modules=["q_proj"]))), "get_peft_model"),
    ]
    for call, message in cases:
        with pytest.raises(ConfigError, match=message):
            call()
    merged = adapted("random", trained=True)
    merged.merge_adapter()
    with pytest.raises(FrozenCoreError, match="unmerge_adapter"):
        set_bases(merged, get_bases(merged), reset=True)
