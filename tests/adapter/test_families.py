"""Every family of transformers against plain autograd, stock PEFT, and the table of docs/from-lora.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from families import FAMILIES, make, outcome, row_on_page, rows_on_page
from frozencore import FrozenCoreConfig, check_lora_directory, export_lora
from frozencore.errors import ConfigError, ModelError

LARGEST_ERROR = 2e-5  # float32
REFUSED = {
    "merge": {"zamba"},  # two blocks share their weights
    "export": {"mamba", "mamba2", "falcon_h1", "nemotron_h"},  # PEFT refuses out_proj of these
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_calibrated_trained_saved_merged_and_exported_as_the_plain_model(name: str) -> None:
    found = outcome(name)
    assert {step for step, names in REFUSED.items() if name in names} == found.refusals.keys(), found.refusals
    assert all(error < LARGEST_ERROR for error in found.errors.values()), found.errors
    assert found.row(name) == row_on_page(name), "python tests/families.py writes the table"


def test_the_table_has_a_row_for_each_family() -> None:
    assert len(rows_on_page()) == len(FAMILIES)


def test_a_classifier_whose_head_has_another_name_than_pefts_reloads(tmp_path: Path) -> None:
    model = get_peft_model(make("xlm classifier"), FrozenCoreConfig(r=2, constructor="random", task_type="SEQ_CLS"))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make("xlm classifier"), tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(model.eval()(ids).logits, again(ids).logits)


def test_a_router_is_no_target() -> None:
    with pytest.raises(ModelError, match="'model.layers.0.*router' is a .*Router.*routers"):
        get_peft_model(make("phimoe"), FrozenCoreConfig(target_modules=["router"]))


@pytest.mark.parametrize("name", sorted(REFUSED["export"]))
def test_what_peft_refuses_is_not_exported(name: str, tmp_path: Path) -> None:
    model = get_peft_model(make(name), FrozenCoreConfig(r=2, constructor="random", target_modules=["out_proj"]))
    with pytest.raises(ConfigError, match="PEFT refuses it: .*out_proj.*--to merged"):
        export_lora(model, tmp_path / "lora")
    assert not (tmp_path / "lora").exists()


def test_check_finds_a_lora_that_peft_would_load_otherwise(tmp_path: Path) -> None:
    """What PEFT itself saves of a shared expert, it loads as an expert."""
    make("deepseek_v3").save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["mlp.shared_experts.down_proj"])
    config.base_model_name_or_path = str(tmp_path / "base")
    layer = "base_model.model.model.layers.1.mlp.shared_experts.down_proj"
    (tmp_path / "lora").mkdir()
    written = {**config.to_dict(), "peft_type": "LORA", "target_modules": ["mlp.shared_experts.down_proj"]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(written))
    factors = {f"{layer}.lora_A.weight": torch.ones(2, 8), f"{layer}.lora_B.weight": torch.ones(16, 2)}
    save_file(factors, tmp_path / "lora" / "adapter_model.safetensors")
    (problem,) = (each for each in check_lora_directory(tmp_path / "lora").problems if "PEFT" in each.engines)
    assert "PEFT" in str(problem)
