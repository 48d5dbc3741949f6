"""The entry for PEFT's method comparison: what it trains, and what it calibrates on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from fixtures import ROOT

FOLDER = ROOT / "benchmarks" / "peft_method_comparison"
EXPERIMENTS = sorted(path.name for path in (FOLDER / "experiments").iterdir())


@pytest.fixture
def entry() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peft_method_comparison_entry", FOLDER / "entry.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_a_configuration_that_peft_reads_and_trains_what_its_name_says(name: str) -> None:
    config = PeftConfig.from_pretrained(str(FOLDER / "experiments" / name))
    llama = LlamaConfig(
        vocab_size=16, hidden_size=3072, intermediate_size=16, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = get_peft_model(LlamaForCausalLM(llama), config)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 28_672


def test_the_rows_are_labelled_as_the_suite_trains_on_them(
    entry: ModuleType, byte_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "right"
    rows = [{"input_ids": tokenizer("x" * (3 + i % 5))["input_ids"]} for i in range(150)]
    batches = list(entry.calibration_batches(rows, tokenizer, 0))
    assert [len(batch["input_ids"]) for batch in batches] == [4] * 32
    for batch in batches:
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            length = int(mask.sum())
            assert torch.equal(labels[: length + 1], ids[: length + 1])  # and the end after them, where one was padded
            assert (labels[length + 1 :] == -100).all()


def test_what_is_no_clone_and_no_experiment_is_one_line(
    entry: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"must be a clone of huggingface/peft, but .* holds no run\.py"):
        entry.load_suite(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"no experiment 'mine'\. Known: llama-3\.2-3B-fcca"):
        entry.place_experiment("mine")
