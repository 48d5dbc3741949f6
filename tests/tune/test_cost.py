"""Bytes and rows of a run: what is foreseen against live tensors, and the largest memory of each phase."""

from __future__ import annotations

import copy
import json
import mmap
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from frozencore.tune import cost
from frozencore.tune.adapters import add_adapter
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.cost import (
    PeakMemory,
    estimate_bytes,
    model_bytes,
    num_trainable,
    process_peak_bytes,
    row_bytes,
    rows_at_once,
    training_state_bytes,
)
from frozencore.tune.load import resolve_targets, without_weights
from frozencore.tune.many.tenant import Tenant, Trained, train_many
from frozencore.tune.methods import METHODS, MethodConfig
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run import execute
from frozencore.tune.training.callbacks import total_bytes
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import ATTENTION, adapted, draw_rows, tiny_gpt2, tiny_llama, tiny_qwen2

ROWS = draw_rows(8, seed=5)
RECIPE = Recipe(learning_rate=1e-2, warmup=0.1, epochs=3, batch_size=2, accumulation=1)
OPTIONS = MethodConfig(r=3, target_modules=ATTENTION, seed=3)


@pytest.mark.parametrize("name", ["lora", "dora", "full", "fcca", "none, with tied weights"])
def test_what_adamw_holds_is_twelve_bytes_a_value(name: str) -> None:
    model = adapted() if name == "fcca" else tiny_qwen2()
    model = add_adapter(METHODS[name], model, OPTIONS) if name in ("lora", "dora", "full") else model
    report = train(model, ROWS, RECIPE, pad_id=0)
    expected = 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.state_held_bytes == training_state_bytes(num_trainable(model)) == expected


def test_a_tenant_in_company_holds_what_it_would_alone() -> None:
    model = adapted()
    trained: dict[str, Trained] = {}
    train_many(model, {"anna": Tenant(ROWS, RECIPE), "ben": Tenant(ROWS[:3], RECIPE)}, trained.update, pad_id=0)
    alone = train(adapted(), ROWS, RECIPE, pad_id=0)
    assert {one.report.state_held_bytes for one in trained.values()} == {alone.state_held_bytes}


def test_tensors_that_are_one_count_once_and_views_as_large_as_they_are() -> None:
    X = torch.zeros(4, 6)
    assert total_bytes([X, X, X.view(24)]) == X.nbytes
    assert total_bytes([X[:, :2], torch.tensor(3.0), torch.zeros(0, 5)]) == 32


def test_the_models_size_is_that_of_its_own_weights_whatever_is_on_it() -> None:
    plain = tiny_llama()
    expected = sum(parameter.nbytes for parameter in plain.parameters())
    assert model_bytes(plain) == expected
    for name in ("lora", "full"):
        assert model_bytes(add_adapter(METHODS[name], copy.deepcopy(plain), OPTIONS)) == expected
    half: nn.Module = copy.deepcopy(plain).to(torch.bfloat16)
    assert model_bytes(half) == expected // 2


MIB = 2**20


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The peaks of three GPUs, which reset to 1."""
    most = {0: 99, 1: 5, 2: 7}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", most.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: most.update({device: 1}))
    return most


def test_with_gpus_the_fullest_of_those_that_hold_the_model_counts(on_gpus: dict[int, int]) -> None:
    parameters = [SimpleNamespace(device=torch.device("cuda", i)) for i in (2, 1)]
    model: Any = SimpleNamespace(parameters=lambda: iter(parameters))
    memory = PeakMemory(model)
    assert memory.largest == 1
    on_gpus.update({0: 99, 1: 30, 2: 40})
    assert memory.largest == 40


def test_on_a_cpu_the_peak_is_that_of_the_run_and_not_of_the_process_before_it() -> None:
    pages = mmap.mmap(-1, 128 * MIB)
    pages[:] = b"1" * len(pages)
    before = process_peak_bytes()
    pages.close()
    memory = PeakMemory(nn.Linear(2, 2))
    if memory.largest == before:
        pytest.skip("this system counts over the whole life of a process")
    assert memory.largest < before - 100 * MIB


@pytest.mark.parametrize(
    ("status", "platform", "unit"),
    [(None, "linux", 1024), (None, "darwin", 1), ("VmSize:\t  300 kB\nVmRSS:\t  200 kB\n", "linux", 1024)],
)
def test_where_status_has_no_peak_it_is_the_systems_own_count_in_its_unit(
    status: str | None, platform: str, unit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cost, "STATUS", tmp_path / "status")
    if status is not None:
        cost.STATUS.write_text(status)
    monkeypatch.setattr(sys, "platform", platform)
    assert process_peak_bytes() == unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def few(**options: object) -> RunConfig:
    return make_config(
        model=str(pocket_model_path()), task="pocket-sentiment", epochs=1, num_evaluation=8, device="cpu",
        **{"num_train": 24, "calibration_size": 8, "rank": 4, **options},
    )  # fmt: skip


def kept_bytes(model: nn.Module, ids: Tensor) -> int:
    """The bytes that autograd keeps of a forward pass without dropout, beside the parameters."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_llama, tiny_gpt2])
def test_a_row_is_foreseen_to_keep_no_less_than_it_does_and_no_more_than_three_times_that(
    make: type[nn.Module], dtype: torch.dtype
) -> None:
    targets = ["c_attn"] if make is tiny_gpt2 else ["q_proj", "v_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted("random", model=make(), dtype=dtype, target_modules=targets)
    ids = torch.arange(32).remainder(30)[None]
    found = kept_bytes(model, ids)
    assert found <= row_bytes(32, model) <= 3 * found


@pytest.mark.parametrize(
    ("rows", "room", "at_once"), [(8, 8, 8), (8, 7.9, 4), (8, 3, 2), (8, 0.1, 1), (6, 5, 3), (7, 5, 1), (1, 9, 1)]
)
def test_as_many_go_at_once_as_fit_and_divide_a_step(
    rows: int, room: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_qwen2()
    weights = sum(p.nbytes for p in model.parameters())
    there = int(weights + 2 * room * row_bytes(20, model)) + 1
    monkeypatch.setattr("frozencore.tune.cost.memory_of", lambda device: there)
    assert rows_at_once(rows, 20, model) == at_once
    assert rows_at_once(rows, 20, model.bfloat16()) == at_once  # the memory that it saves stays free


def test_a_run_cut_as_it_fits_is_the_run_of_one_row_after_the_other(tmp_path: Path) -> None:
    fitted = execute(few(batch_size="auto"), tmp_path / "fitted", lambda *_: None)
    alone = execute(few(batch_size=1), tmp_path / "alone", lambda *_: None)
    for record, batch_size, accumulation in ((fitted, 8, 1), (alone, 1, 8)):
        assert record.resolved.recipe.items() >= {"batch_size": batch_size, "accumulation": accumulation}.items()
    assert fitted.training.losses == pytest.approx(alone.training.losses, rel=1e-5)
    cores, expected = (load_file(tmp_path / n / "adapter/adapter_model.safetensors") for n in ("fitted", "alone"))
    assert expected
    for name, core in expected.items():
        torch.testing.assert_close(cores[name], core, rtol=1e-3, atol=1e-5)


SMALL = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


def estimated(
    method: str, *, num_rows: int = 4, length: int = 64, dtype: torch.dtype = torch.float32, calibrated: int = 1
) -> int:
    config = make_config(model="pocket", task="sst2", method=method).method
    model = without_weights(SMALL).to(dtype)
    return estimate_bytes(config, model, resolve_targets(config, model), (num_rows, length), (calibrated, length))


def test_an_estimate_grows_with_rows_tokens_values_and_bytes_of_a_value() -> None:
    usual = estimated("fcca")
    assert estimated("fcca", length=128) > 1.5 * usual
    assert estimated("fcca", num_rows=8) > 1.5 * usual
    assert estimated("fcca", dtype=torch.bfloat16) < usual
    assert estimated("full", num_rows=1, length=8) > 2 * estimated("fcca", num_rows=1, length=8)
    assert estimated("pissa") == estimated("lora")


def test_the_pass_that_takes_more_counts_and_without_calibration_there_is_but_one() -> None:
    assert estimated("fcca", calibrated=8) > estimated("fcca", num_rows=8) > 1.5 * estimated("fcca")
    assert estimated("lora", calibrated=8) == estimated("lora")


MODELS = {
    "narrow": ("llama", {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
                         "num_attention_heads": 8, "num_key_value_heads": 4}),
    "many tokens": ("llama", {"vocab_size": 16384, "hidden_size": 384, "intermediate_size": 1024,
                              "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 6}),
    "gpt2": ("gpt2", {"vocab_size": 2048, "n_embd": 384, "n_layer": 6, "n_head": 6}),
    "deep": ("qwen2", {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12,
                       "num_attention_heads": 4, "num_key_value_heads": 2}),
}  # fmt: skip
MEASURE = """
import json, sys, torch, accelerate, datasets, peft
from pathlib import Path
from frozencore.tune.config import make_config
from frozencore.tune.cost import _status, estimate_bytes, outline_of
from frozencore.tune.load import resolve_targets
from frozencore.tune.run import execute
config = make_config(**json.loads(sys.argv[1]))
torch.randn(64, 64).requires_grad_().mm(torch.randn(64, 64)).sum().backward()
before = _status("VmRSS")
record = execute(config, Path(sys.argv[2]), lambda *_: None)
base = outline_of(config.model)
targets = resolve_targets(config.method, base.model)
largest = (8, int(sys.argv[3]))
print(record.peak_memory_bytes - before, estimate_bytes(config.method, base.model, targets, largest, largest))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fcca", "lora", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_an_estimate_is_within_a_quarter_of_what_a_run_takes(name: str, method: str, tmp_path: Path) -> None:
    """Above the memory of Python and its libraries, most of what a small run takes."""
    kind, options = MODELS[name]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    tokenizer.save_pretrained(tmp_path / "model")
    texts = [f"Tom has {i} cats and buys 2 cats . " * 20 for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {
        "model": str(tmp_path / "model"), "data": str(tmp_path / "rows.jsonl"), "method": method, "epochs": 1,
        "num_train": 16, "num_evaluation": 4, "calibration_size": 8, "batch_size": 8, "accumulation": 1,
        "device": "cpu", "samples": 0, "exact_match": "no",
    }  # fmt: skip
    longest = 1 + max(len(tokenizer(text)["input_ids"]) for text in texts)
    words = [sys.executable, "-c", MEASURE, json.dumps(options), str(tmp_path / "run"), str(longest)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    measured, estimate = map(int, done.stdout.split()[-2:])
    assert estimate == pytest.approx(measured, rel=0.25)
