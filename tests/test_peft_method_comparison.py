"""The entry for PEFT's method comparison: what it trains, what it calibrates on, and a run of the suite's own runner.

The last needs a clone of huggingface/peft: PEFT_REPOSITORY says where it is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fixtures import ROOT
from frozencore import frozen_core_layers
from tiny import tiny_llama

FOLDER = ROOT / "benchmarks" / "peft_method_comparison"
EXPERIMENTS = sorted(path.name for path in (FOLDER / "experiments").iterdir())
CLONE = os.environ.get("PEFT_REPOSITORY", "")


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


OF_AN_ACCELERATOR = {
    "memory_allocated": lambda: 0, "memory_reserved": lambda: 0, "max_memory_reserved": lambda: 0,
    "empty_cache": lambda: None, "reset_peak_memory_stats": lambda: None, "manual_seed_all": lambda _: None,
    "get_device_name": lambda _: "a CPU",
}  # fmt: skip


@pytest.fixture
def _suite_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The suite wants a GPU and says so when it is imported; its folder and its modules are forgotten afterwards."""
    before, path, here = set(sys.modules), list(sys.path), Path.cwd()
    monkeypatch.setattr("peft.utils.infer_device", lambda: "cuda")
    for name, function in OF_AN_ACCELERATOR.items():
        monkeypatch.setattr(torch.cpu, name, function, raising=False)
    yield
    os.chdir(here)
    sys.path[:] = path
    for name in ("run", "utils", "data"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.skipif(not CLONE, reason="PEFT_REPOSITORY names no clone of huggingface/peft")
@pytest.mark.usefixtures("_suite_on_a_cpu")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_suites_own_runner_trains_cores_on_calibrated_bases(
    entry: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Callable[..., Any]
) -> None:
    import shutil

    from datasets import Dataset, DatasetDict

    clone = tmp_path / "peft"
    shutil.copytree(Path(CLONE) / entry.SUITE, clone / entry.SUITE, ignore=shutil.ignore_patterns("*results"))
    suite = entry.load_suite(clone)
    utils, data = sys.modules["utils"], sys.modules["data"]
    questions = [f"What is {i} and {i}?" for i in range(60)]
    answers = [f"It is so. The answer is: {2 * i}" for i in range(60)]
    metamath = {"query": questions, "response": answers, "type": questions, "original_question": questions}
    gsm8k = Dataset.from_dict({"question": questions, "answer": [f"#### {2 * i}" for i in range(60)]})
    found = {
        "meta-math/MetaMathQA": {"train": Dataset.from_dict(metamath)},
        "openai/gsm8k": DatasetDict(train=gsm8k, test=gsm8k),
    }
    base = tiny_llama()
    base.resize_token_embeddings(300)
    made: list[nn.Module] = []
    monkeypatch.setattr(data, "load_dataset", lambda name, *_: found[name])
    monkeypatch.setattr(suite, "get_wiki_small", lambda: [])
    monkeypatch.setattr(suite, "calculate_mean_per_token_loss", lambda **_: 1.5)
    monkeypatch.setattr(utils.AutoTokenizer, "from_pretrained", lambda _: byte_tokenizer())
    monkeypatch.setattr(utils.AutoModelForCausalLM, "from_pretrained", lambda **_: made.append(base) or base)
    monkeypatch.setattr(utils, "device", "cpu")
    for module in (suite, utils):
        monkeypatch.setattr(module, "infer_device", lambda: "cpu")
        monkeypatch.setattr(module, "get_peft_branch", lambda: "main")
        monkeypatch.setattr(module, "get_base_model_info", lambda _: None, raising=False)
        monkeypatch.setattr(module, "get_dataset_info", lambda _: None, raising=False)
    monkeypatch.setattr(utils, "get_peft_worktree_is_dirty", lambda: False)
    defaults = Path(utils.FILE_NAME_DEFAULT_TRAIN_PARAMS)
    few = {"max_steps": 4, "eval_steps": 2, "dtype": "float32", "generation_kwargs": {"max_new_tokens": 2}}
    defaults.write_text(json.dumps(json.loads(defaults.read_text()) | few))
    (clone / entry.SUITE / "results").mkdir()
    monkeypatch.setattr(entry, "load_suite", lambda _: suite)

    entry.main([name, "--peft", str(clone), "--clean"])

    (result,) = (clone / entry.SUITE / "results").glob("*.json")
    told = json.loads(result.read_text())
    assert told["run_info"]["experiment_name"] == f"frozencore/{name}"
    assert (told["train_info"]["status"], told["run_info"]["error_msg"]) == ("success", "")
    assert [metric["step"] for metric in told["train_info"]["metrics"]] == [2, 4, 4]
    layers = frozen_core_layers(made[0], "default")
    assert layers
    for layer in layers.values():
        P, _, R = layer.factors("default")
        assert torch.linalg.matrix_norm(P) > 0
        assert torch.linalg.matrix_norm(R) > 0
    assert told["train_info"]["num_trainable_params"] == sum(layer.core("default").numel() for layer in layers.values())
