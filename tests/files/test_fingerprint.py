"""Fingerprints of models and options."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from frozencore import FrozenCoreConfig
from frozencore.files.fingerprint import fingerprint_model, fingerprint_tensors
from frozencore.options import fingerprint_options
from tiny import tiny_qwen2


def test_the_fingerprint_of_a_model_sees_every_bit_name_shape_and_dtype() -> None:
    reference = fingerprint_model(tiny_qwen2())
    assert reference == fingerprint_model(tiny_qwen2())
    assert reference != fingerprint_model(tiny_qwen2(seed=1))
    assert reference != fingerprint_model(tiny_qwen2().bfloat16())
    for x in (torch.arange(6.0), torch.empty(6, device="meta")):
        other = x + 1e-6 if not x.is_meta else torch.zeros(6)
        items = (("a", x), ("b", x), ("a", x.view(2, 3)), ("a", x.double()), ("a", other))
        assert len({fingerprint_tensors([item]) for item in items}) == 5
        assert fingerprint_tensors([("a", x)]) == fingerprint_tensors([("a", x.clone())])


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]])
def test_adapters_on_a_model_do_not_change_its_fingerprint(modules_to_save: list[str] | None) -> None:
    reference = fingerprint_model(tiny_qwen2(tie_word_embeddings=False))
    for config in (
        FrozenCoreConfig(r=2, constructor="random", modules_to_save=modules_to_save),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=modules_to_save),
    ):
        model = get_peft_model(tiny_qwen2(tie_word_embeddings=False), config)
        assert fingerprint_model(model) == reference
        assert fingerprint_model(model.get_base_model()) == reference
        for name, parameter in model.named_parameters():
            if "frozencore_R" in name or "lora_B" in name:
                parameter.data.fill_(0.1)
        assert fingerprint_model(model) == reference
        model.merge_adapter()
        assert fingerprint_model(model) != reference


def test_the_fingerprint_of_options_ignores_the_order_of_keys_alone() -> None:
    assert fingerprint_options({"a": 1, "b": 2}) == fingerprint_options({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint_options({"a": float("nan")})
