"""``frozencore export`` and ``frozencore check``: what a user types, sees, and gets as exit status."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import frozencore_basis_model
from frozencore.tune.pocket import pocket_model_path
from tiny import adapted, logits, tiny_qwen2

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path, PeftModel]:
    """An adapter folder, its base model's folder, and the model."""
    model = adapted("random", trained=True, target_modules=["q_proj"])
    tiny_qwen2().save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", tmp_path / "base", model


def test_export_to_lora_says_what_was_written_and_who_takes_it(
    command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, _ = saved
    status, out, _ = command("export", adapter, "--base", base, "--to", "lora", "--out", tmp_path / "lora")
    assert status == 0
    assert "rank 3, 2 layers and 4 of zeros" in out
    assert "Taken by: vLLM, SGLang, llama.cpp" in out
    assert "--max-lora-rank 8" in out
    assert command("check", tmp_path / "lora")[0] == 0
    AutoTokenizer.from_pretrained(pocket_model_path()).save_pretrained(adapter)
    status, out, err = command("export", adapter, "--base", base, "--to", "merged", "--out", tmp_path / "merged")
    assert (status, "Merged model" in out, err) == (0, True, "")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").vocab_size > 100


def test_a_runs_folder_stands_for_the_adapter_in_it(
    command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, _ = saved
    shutil.copytree(adapter, tmp_path / "run" / "adapter")
    for place in (adapter, tmp_path / "run"):
        words = ["export", place, "--base", base, "--out", tmp_path / f"lora-of-{place.name}"]
        assert command(*words)[0] == 0
    inspected = [command("inspect", place, "--json")[:2] for place in (adapter, tmp_path / "run")]
    assert inspected[0] == inspected[1]
    first, second = (tmp_path / f"lora-of-{place.name}" for place in (adapter, tmp_path / "run"))
    name = "adapter_model.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_basis_model_and_its_tenant_are_two_commands_that_say_how_they_are_served(
    command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, model = saved
    shop, tenant = tmp_path / "shop", tmp_path / "tenant"
    status, out, _ = command("export", adapter, "--base", base, "--to", "basis-model", "--with-code", "--out", shop)
    said = " ".join(out.split())
    assert (status, "rank 3, 2 layers" in said) == (0, True)
    assert "--enable-lora --max-lora-rank 8 --lora-target-modules core --trust-remote-code" in said
    assert "its heads have 8 values, not one of 32, 64" in said
    assert (shop / "frozencore_basis_model.py").read_bytes() == Path(frozencore_basis_model.__file__).read_bytes()
    status, out, _ = command("export", adapter, "--to", "tenant", "--base", shop, "--out", tenant)
    assert (status, "Taken by: vLLM\n" in out, "Not taken by: SGLang, llama.cpp" in out) == (0, True, True)
    assert f"--model {shop} --enable-lora" in " ".join(out.split())
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(shop), tenant).eval()
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=1e-5)


def test_check_names_the_engines_that_refuse_and_the_way_out(
    command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, _ = saved
    command("export", adapter, "--base", base, "--out", tmp_path / "lora")
    config = tmp_path / "lora" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_rslora": True}))
    status, out, _ = command("check", tmp_path / "lora")
    assert status == 1
    assert "Taken by: vLLM\n" in out
    assert "Not taken by: SGLang, llama.cpp" in out
    assert "lora_alpha = alpha times sqrt(r)" in out
