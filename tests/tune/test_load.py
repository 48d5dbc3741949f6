"""Which models are loaded, and which of their layers a run adapts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from families import make
from frozencore import calibrate, export_lora, export_merged
from frozencore.errors import ArtifactError, CalibrationError, ConfigError, ModelError
from frozencore.files.hub import safe_loading
from frozencore.tune import load as models
from frozencore.tune.adapters import add_adapter
from frozencore.tune.config import make_config
from frozencore.tune.load import load_model, resolve_targets
from frozencore.tune.methods import Targets
from input_files import write_rows
from tiny import ATTENTION, BATCHES, adapted, tiny_qwen2


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), ("model.layers.1.mlp.up_proj",)])
def test_layers_that_are_named_and_there_are_adapted_as_they_were_named(targets: Targets, qwen2: nn.Module) -> None:
    assert resolve_targets(make_config(model="any", task="sst2", targets=targets).method, qwen2) == targets


def test_without_names_the_attention_projections_that_the_model_has_are_adapted(
    qwen2: nn.Module, gpt2: nn.Module
) -> None:
    unnamed = make_config(model="any", task="sst2")
    assert resolve_targets(unnamed.method, qwen2) == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert resolve_targets(unnamed.method, gpt2) == ("c_attn", "attn.c_proj")


def test_a_model_without_attention_must_be_told_its_layers_and_they_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"No default layers .*'all-linear'.*has: in_proj, lm_head,"):
        resolve_targets(make_config(model="any", task="sst2").method, make("mamba"))


@pytest.mark.parametrize("targets", ["all-linear", None, ("q_proj", "down_proj"), ("model.layers.1.mlp.up_proj",)])
def test_the_last_blocks_alone_are_adapted_in_full_names(targets: Targets | None, qwen2: nn.Module) -> None:
    everywhere = make_config(model="any", task="sst2", method="lora", targets=targets)
    last = everywhere.replaced(layers=1)
    found = resolve_targets(last.method, qwen2)
    assert all(name.startswith("model.layers.1.") for name in found)
    every = add_adapter(
        everywhere.method.entry,
        qwen2,
        replace(everywhere.method, target_modules=resolve_targets(everywhere.method, qwen2)),
    )
    adapted = {name for name, module in every.get_base_model().named_modules() if hasattr(module, "lora_A")}
    assert set(found) == {name for name in adapted if ".1." in name}


def test_several_processes_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "num_started", lambda: 2)
    with pytest.raises(ConfigError, match=r"own, but --device cuda:1 was given for 2\. Use cuda\."):
        load_model("pocket", device="cuda:1")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_model_that_reads_later_tokens_is_refused(
    kind: str, tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, **sizes, eos_token_id=257, bos_token_id=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    if kind == "gpt2":
        load_model(str(tmp_path), device="cpu")
        return
    with pytest.raises(ModelError, match=r"later tokens \(BertLMHead"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("words", "known", "others"),
    [
        (["[C]", "[=O]", "[Branch1]"], "[C] [=O]", "A word"),  # SELFIES
        (["ACG", "CGT"], "ACG CGT", "A word"),
        (["你", "好"], "你 好", "A word"),
    ],
)
def test_a_tokenizer_of_another_alphabet_is_tried_on_the_rows(
    words: list[str], known: str, others: str, tmp_path: Path
) -> None:
    vocabulary = {word: i for i, word in enumerate(("<unk>", "</s>", *words))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    read = models.load_tokenizer(str(tmp_path))
    assert read(known)["input_ids"] == [vocabulary[word] for word in known.split()]
    base = models.Base(tiny_qwen2(vocab_size=len(vocabulary)), read)
    for text, refused in ((known, nullcontext()), (others, pytest.raises(ModelError, match="no word of the rows"))):
        rows = [{"prompt": text + f" {text}" * i, "completion": f" {text}"} for i in range(4)]
        config = make_config(model="none", data=str(write_rows(tmp_path / "rows.jsonl", rows)))
        with refused:
            models.prepare(config.model, config.rows, config.scoring, lambda *_: None, base)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelError, match="knows no words, as tokenizer.json or its like is missing"):
        models.load_tokenizer(str(tmp_path))


def test_more_blocks_than_there_are_is_one_line(qwen2: nn.Module) -> None:
    config = make_config(model="any", task="sst2", layers=3)
    with pytest.raises(ConfigError, match="--layers 3 is more than the 2 blocks of this model"):
        resolve_targets(config.method, qwen2)


TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
LINEAR = {f"linear_{part}": 8 if part.endswith("dim") else 2 for part in
          ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}  # fmt: skip
WRAPPERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {**TEXT, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
        "vision_config": TOWER,
    },
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": {**TEXT, "hidden_size_per_layer_input": 0, "layer_types": ["full_attention"] * 2},
        "vision_config": None, "audio_config": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_model_with_a_part_for_images_is_trained_and_exported_in_the_class_that_it_was_saved_as(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **WRAPPERS[kind])
    saved = AutoModelForImageTextToText.from_config(config)
    saved.save_pretrained(tmp_path / "base")
    base = models._weights(safe_loading(str(tmp_path / "base")), "auto")
    assert type(base) is type(saved) is type(models.without_weights(base.config))
    names = [name for name, _ in base.named_modules() if "language_model" in name and name.endswith(ATTENTION)]
    short = adapted("fcca", model=copy.deepcopy(base), calibrated=False, target_modules=["q_proj", "v_proj"])
    if kind == "gemma3":  # its vision tower has layers of the same short names
        with pytest.raises(CalibrationError, match=r"name the other layers in full, such as 'model\.language_model\."):
            calibrate(short, BATCHES, progress=False)
    model = adapted("fcca", model=base, target_modules=names, trained=True)
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "adapter")
    export_lora(tmp_path / "adapter", tmp_path / "lora", base=tmp_path / "base")
    export_merged(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    stock = PeftModel.from_pretrained(type(saved).from_pretrained(tmp_path / "base"), tmp_path / "lora")
    for exported in (stock, type(saved).from_pretrained(tmp_path / "merged")):
        torch.testing.assert_close(exported(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    if kind == "qwen3_5":  # AutoModelForCausalLM loads its language model alone
        text = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        text.save_pretrained(tmp_path / "text base")
        adapted("random", model=text).save_pretrained(tmp_path / "text")
        for export in (export_lora, export_merged):
            with pytest.raises(ArtifactError, match="in another class|in the class that it was trained in"):
                export(tmp_path / "text", tmp_path / "out", base=tmp_path / "base")
        export_lora(tmp_path / "text", tmp_path / "out", base=tmp_path / "text base")


@pytest.fixture
def saved_as(tmp_path: Path) -> Callable[[torch.dtype], str]:
    """The pocket model saved in another dtype."""

    def save(dtype: torch.dtype) -> str:
        model, tokenizer = load_model("pocket", device="cpu")
        for part in (model.to(dtype), tokenizer):
            part.save_pretrained(tmp_path / "saved")
        return str(tmp_path / "saved")

    return save


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("is_fast", "memory", "auto"), [(True, 2**40, None), (False, 2**40, torch.float32), (False, 1, None)]
)
def test_auto_is_float32_on_a_cpu_that_computes_the_saved_dtype_slowly_if_memory_holds_it(
    dtype: torch.dtype,
    is_fast: bool,
    memory: int,
    auto: torch.dtype | None,
    saved_as: Callable[[torch.dtype], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, folder = str(dtype).removeprefix("torch."), saved_as(dtype)
    for query in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, query, lambda: is_fast)
    monkeypatch.setattr(models, "memory_of", lambda _: memory)
    model, _ = load_model(folder, device="cpu")
    assert model.dtype == (auto or dtype)
    asked, _ = load_model(folder, dtype=name, device="cpu")
    assert asked.dtype == dtype
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert all(torch.equal(p.to(dtype), q) for p, q in zip(model.parameters(), saved.parameters(), strict=True))
    said = models.dtype_in_words(model, "auto")
    assert (said is None) == is_fast
    assert models.dtype_in_words(asked, name) is None
    if said is not None:
        assert name in said
        assert "float32" in said
