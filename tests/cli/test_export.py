"""``frozencore export``: what a user types, sees, and gets as exit status."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    WhisperFeatureExtractor,
    WhisperProcessor,
)

import frozencore_basis_model
from fixtures import CHAT_TEMPLATE
from frozencore import FrozenCoreConfig, export_basis_model, export_merged, save_basis
from frozencore.adapter.export.serving import vllm_max_rank
from frozencore.tune.pocket import pocket_model_path
from tiny import adapted, cores_of, logits, tiny_gpt2, tiny_qwen2, train_at_random

Command = Callable[..., tuple[int, str, str]]
NEW = 869  # the first token after those of the pocket model


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path, PeftModel]:
    """An adapter folder, its base model's folder, and the model."""
    model = adapted("random", trained=True, target_modules=["q_proj"])
    tiny_qwen2().save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", tmp_path / "base", model


def test_export_to_lora_says_what_was_written_and_how_vllm_is_started(
    command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, _ = saved
    status, out, _ = command("export", adapter, "--base", base, "--to", "lora", "--out", tmp_path / "lora")
    assert status == 0
    assert "rank 3, 2 layers and 4 of zeros" in out
    assert "vLLM: --enable-lora --max-lora-rank 8" in out
    AutoTokenizer.from_pretrained(pocket_model_path()).save_pretrained(adapter)
    status, out, err = command("export", adapter, "--base", base, "--to", "merged", "--out", tmp_path / "merged")
    assert (status, "Merged model" in out, err) == (0, True, "")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").vocab_size > 100


@pytest.mark.parametrize("form", ["lora", "merged", "basis-model"])
def test_what_an_export_reads_is_never_replaced(
    form: str, command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    _, base, model = saved
    save_basis(model, tmp_path / "shop/basis")
    model.save_pretrained(tmp_path / "far/away/tenants/anna")
    read = (base, tmp_path / "shop/basis")
    before = {file: file.read_bytes() for place in read for file in place.iterdir()}
    for out in read:
        words = [
            "export",
            tmp_path / "far/away/tenants/anna",
            "--base",
            base,
            "--to",
            form,
            "--out",
            out,
            "--overwrite",
        ]
        status, _, err = command(*words)
        assert (status, err.count("\n")) == (2, 1)
        assert "write the result to another folder" in err
    assert {file: file.read_bytes() for place in read for file in place.iterdir()} == before


def test_a_link_to_a_folder_is_written_through(
    command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, _ = saved
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    assert command("export", adapter, "--base", base, "--out", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk/adapter_config.json").is_file()


def test_a_lora_whose_base_is_not_here_says_that_it_was_not_compared(command: Command, tmp_path: Path) -> None:
    model = adapted("random", trained=True)  # all of q, k, v: nothing is asked of the base
    model.peft_config["default"].base_model_name_or_path = "nobody/has-this"
    model.save_pretrained(tmp_path / "adapter")
    status, out, err = command("export", tmp_path / "adapter", "--out", tmp_path / "lora")
    assert (status, err) == (0, "")
    assert "Not compared with its base model" in out


def test_a_base_of_another_class_is_named(
    command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, _ = saved
    body = get_peft_model(tiny_qwen2().model, FrozenCoreConfig(r=2, constructor="random", target_modules=["q_proj"]))
    body.save_pretrained(tmp_path / "of-the-body")
    status, _, err = command("export", tmp_path / "of-the-body", "--base", base, "--out", tmp_path / "lora")
    assert (status, err.count("\n")) == (2, 1)
    assert "in another class of the base model, where the layer model.layers.0.self_attn.q_proj is 'layers.0." in err
    words = ["--base", base, "--to", "basis-model", "--out", tmp_path / "shop"]
    assert command("export", adapter, *words)[0] == 0
    status, _, err = command("export", adapter, "--base", tmp_path / "shop", "--to", "merged", "--out", tmp_path / "m")
    assert (status, err.count("\n")) == (2, 1)
    assert "names the class TransformersForCausalLM" in err


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
    shop, tenant = tmp_path / "the shop", tmp_path / "tenant"
    status, out, _ = command("export", adapter, "--base", base, "--to", "basis-model", "--with-code", "--out", shop)
    said = " ".join(out.split())
    assert (status, "rank 3, 2 layers" in said) == (0, True)
    assert "--enable-lora --max-lora-rank 8 --lora-target-modules core --max-loras 64 --trust-remote-code" in said
    assert "its heads have 8 values, not one of 32, 64" in said
    assert (shop / "frozencore_basis_model.py").read_bytes() == Path(frozencore_basis_model.__file__).read_bytes()
    status, out, _ = command("export", adapter, "--to", "tenant", "--base", shop, "--out", tenant)
    assert status == 0
    assert f"--model '{shop}' --enable-lora --max-lora-rank 8 --lora-target-modules core" in " ".join(out.split())
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(shop), tenant).eval()
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rank", "admitted"), [(1, 1), (3, 8), (16, 16), (257, 320), (512, 512), (600, None)])
def test_vllm_gets_the_smallest_maximum_rank_that_admits_the_adapters(rank: int, admitted: int | None) -> None:
    assert vllm_max_rank(rank) == admitted


def test_a_lora_of_conv1d_layers_is_for_peft_alone(command: Command, tmp_path: Path) -> None:
    adapted("random", model=tiny_gpt2(), trained=True, target_modules=["c_attn"]).save_pretrained(tmp_path / "core")
    tiny_gpt2().save_pretrained(tmp_path / "base")
    words = ("export", tmp_path / "core", "--base", tmp_path / "base", "--out", tmp_path / "lora")
    status, out, _ = command(*words)
    assert (status, "PEFT alone loads" in out, "vLLM:" in out) == (0, True, False)


def test_a_merged_model_has_the_tokenizer_and_the_processor_of_its_base(
    saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, _ = saved
    shutil.copy(pocket_model_path() / "tokenizer.json", base)  # alone, as in old repositories
    export_merged(adapter, tmp_path / "text", base=base)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "text")
    assert tokenizer.vocab_size > 100
    WhisperProcessor(WhisperFeatureExtractor(feature_size=8), tokenizer).save_pretrained(base)
    export_merged(adapter, tmp_path / "speech", base=base)
    assert AutoProcessor.from_pretrained(tmp_path / "speech").feature_extractor.feature_size == 8


@pytest.mark.parametrize(
    ("trained", "tied"),
    [({"modules_to_save": ["embed_tokens", "lm_head"]}, False), ({"trainable_token_indices": [NEW]}, True)],
)
def test_an_adapter_of_new_tokens_is_merged_into_its_base_as_it_was_before(
    trained: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    base, tokenizer = (
        tiny_qwen2(vocab_size=NEW, tie_word_embeddings=tied),
        AutoTokenizer.from_pretrained(pocket_model_path()),
    )
    base.save_pretrained(tmp_path / "base")
    tokenizer.add_tokens(["<new>"])
    base.resize_token_embeddings(len(tokenizer))
    model = adapted("random", model=base, trained=True, **trained)
    for name, parameter in model.named_parameters():
        if "tokens_delta" in name or "modules_to_save" in name:
            nn.init.normal_(parameter)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "adapter")
    export_merged(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    ids = torch.tensor([[NEW, 3]])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
    torch.testing.assert_close(found, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_a_merge_in_half_precision_says_how_much_of_the_update_it_loses(
    command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, model = saved
    train_at_random(model, size=0.02)
    model.save_pretrained(adapter)
    tiny_qwen2().bfloat16().save_pretrained(base)
    words = ("export", adapter, "--base", base, "--to", "merged", "--out")
    said = re.search(r"update, ([\d.]+)% .Frobenius norm. is lost .*bfloat16", command(*words, tmp_path / "half")[2])
    assert said is not None
    assert "is lost" not in command(*words, tmp_path / "whole", "--dtype", "float32")[2]
    merged, lost, whole = AutoModelForCausalLM.from_pretrained(tmp_path / "half"), 0.0, 0.0
    for layer in cores_of(model):
        update = layer.get_delta_weight("default")
        found = merged.get_submodule(layer.name).weight.float() - layer.get_base_weight().bfloat16().float()
        lost, whole = lost + float((found - update).square().sum()), whole + float(update.square().sum())
    assert float(said[1]) == pytest.approx(100 * (lost / whole) ** 0.5, rel=0.05)


@pytest.mark.parametrize("export", [export_merged, export_basis_model])
def test_an_exported_model_names_no_code_that_is_not_beside_it(
    export: Callable[..., object], saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, _ = saved
    values = json.loads((base / "config.json").read_text())
    values["auto_map"] = {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"}
    (base / "config.json").write_text(json.dumps(values))
    export(adapter, tmp_path / "out", base=base)
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("form", ["merged", "basis-model"])
def test_an_exported_model_stops_where_its_chat_template_ends_an_answer(
    form: str, command: Command, saved: tuple[Path, Path, PeftModel], tmp_path: Path
) -> None:
    adapter, base, model = saved
    save_basis(model, tmp_path / "basis")
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("</s>", "<|im_end|>")
    tokenizer.save_pretrained(base)
    source = tmp_path / "basis" if form == "basis-model" else adapter
    assert command("export", source, "--base", base, "--to", form, "--out", tmp_path / "out")[0] == 0
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in settings["eos_token_id"]
