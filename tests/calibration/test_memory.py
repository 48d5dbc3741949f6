"""Where the sums of calibration are, and the memory that they take: budgets, devices, and what waits on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from adapted import BATCHES, DATA_DRIVEN, adapted, cores_of
from frozencore import CalibrationOptions, FrozenCoreConfig, calibrate, collect_moments, frozen_core_layers
from frozencore.adapter import calibrate as calibration
from frozencore.adapter.calibrate import layer_costs, targets_of
from frozencore.calibration.calibration_options import LayerCost, memory_bytes, plan_passes, smallest_budget
from frozencore.calibration.taps import FiniteBatches
from frozencore.errors import ConfigError
from frozencore.maths.linalg import truncated_svd
from frozencore.maths.moments import MOMENT_NAMES
from places import SOURCES, TESTS
from tiny import attention_names, batches_of, draw_examples, tiny_qwen2


def test_a_size_is_read() -> None:
    sizes = {"8GiB": 8 * 2**30, "512 MB": 512 * 10**6, "1.5kib": 1536, " 2 tb ": 2 * 10**12, "7": 7, 7: 7, "7B": 7}
    assert {size: memory_bytes(size) for size in sizes} == sizes


def exact(sums: int, **others: int) -> LayerCost:
    return LayerCost(**{"sums": sums, "waiting": 0, "passing": 0, "building": 0, "basis": 0, **others})


def test_groups_are_neighbours_and_as_few_as_fit() -> None:
    costs = {name: exact(size) for name, size in zip("abcde", (4, 4, 2, 6, 3), strict=True)}
    assert plan_passes(costs, 100) == ([("a", "b", "c", "d", "e")], 19)
    assert plan_passes(costs, 10)[0] == [("a", "b", "c"), ("d", "e")]
    assert plan_passes(costs, 100, group_size=2)[0] == [("a", "b"), ("c", "d"), ("e",)]


def test_every_kind_of_memory_counts() -> None:
    costs = {"a": exact(4, waiting=2, passing=3, building=1, basis=1), "b": exact(4, waiting=2, passing=1, building=9)}
    assert plan_passes(costs, 1000)[1] == 1 + 8 + 9  # the dearer of 2 + 2 + 3 and 9
    assert plan_passes(costs, 15)[0] == [("a",), ("b",)]


def test_an_impossible_budget_names_the_smallest_that_works() -> None:
    costs = {"a": exact(5), "b": exact(400 * 2**20), "c": exact(7)}
    smallest = smallest_budget(costs)
    with pytest.raises(ConfigError, match=rf'smallest that works is "{-(-smallest // 10**6)}MB"') as caught:
        plan_passes(costs, 2**20)
    assert "\n" not in str(caught.value)
    assert len(plan_passes(costs, smallest)[0]) >= 3
    with pytest.raises(ConfigError):
        plan_passes(costs, smallest - 1)


def costs_of(model: PeftModel, batches: list[Any] = BATCHES) -> dict[str, LayerCost]:
    targets = targets_of(frozen_core_layers(model, "default"), "default")
    return layer_costs(model, model.peft_config["default"], targets, batches)


def test_a_batch_in_another_form_costs_as_much() -> None:
    """With a loss of the user's own, a batch may be a tuple or hold dictionaries."""
    model = adapted("fcca", calibrated=False)
    pairs = [(batch["input_ids"], batch["labels"]) for batch in BATCHES]
    assert costs_of(model, pairs) == costs_of(model, [{"pair": batch} for batch in BATCHES]) == costs_of(model)


@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_a_budget_that_takes_several_passes_gives_the_same_bytes(constructor: str) -> None:
    one, several = adapted(constructor), adapted(constructor, calibrated=False)
    examples: list[int] = []
    costs = costs_of(several)
    plans = {size: plan_passes(costs, size) for size in range(smallest_budget(costs), 2**20, 1024)}
    budget = next(size for size, plan in plans.items() if len(plan[0]) > 1)
    calibrate(
        several, iter(BATCHES), memory_budget=budget,
        progress=lambda stage, done, total: examples.append(done) if stage == "calibration" else None,
    )  # fmt: skip
    assert max(examples) > 8  # more than one pass over the eight examples
    for layer, other in zip(cores_of(one), cores_of(several), strict=True):
        assert all(torch.equal(X, Y) for X, Y in zip(layer.factors("default"), other.factors("default"), strict=True))


def test_under_gradient_checkpointing_the_inputs_of_one_block_wait_whatever_the_depth() -> None:
    peaks = {}
    for num_layers in (2, 8):
        for checkpointing in (False, True):
            model = adapted("fcca", model=tiny_qwen2(num_hidden_layers=num_layers), calibrated=False)
            if checkpointing:
                model.gradient_checkpointing_enable()
            costs = costs_of(model)
            sums = sum(cost.sums + cost.basis for cost in costs.values())
            peaks[num_layers, checkpointing] = plan_passes(costs, 2**30)[1] - sums
    assert peaks[8, False] > 2 * peaks[2, False]
    assert peaks[8, True] == peaks[2, True] < peaks[8, False]


@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_a_budget_below_one_layer_is_refused_and_the_named_one_works(constructor: str) -> None:
    model = adapted(constructor, calibrated=False)
    with pytest.raises(ConfigError, match="smallest that works is") as refused:
        calibrate(model, BATCHES, memory_budget=1000, progress=False)
    calibrate(model, BATCHES, memory_budget=str(refused.value).split('"')[1], progress=False)


def peak_of(constructor: str, budget: str, *sizes: int) -> dict[str, int]:
    """Resident memory over what it was before, in a process whose allocator gives all of it back."""
    environment = os.environ | {
        "PYTHONPATH": f"{SOURCES}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    words = [sys.executable, str(TESTS / "calibration" / "test_memory.py"), constructor, budget]
    words += map(str, sizes)
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


BLOCK_OF_7B, SMALL = (3584, 18944, 1), (896, 1792, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constructor", "budget", "sizes"),
    [
        ("fcca", "2GiB", BLOCK_OF_7B), ("fcca", "800MiB", BLOCK_OF_7B), ("fcca", "28MiB", SMALL),
        ("fcca", "40MiB", SMALL), ("rawgrad", "80MiB", SMALL), ("signgrad", "60MiB", SMALL), ("eva", "210MiB", SMALL),
        ("filora", "225MiB", SMALL),
    ],
)  # fmt: skip
def test_all_linear_layers_of_a_model_stay_within_their_budget(
    constructor: str, budget: str, sizes: tuple[int, ...]
) -> None:
    """The peak is VmHWM of a process of its own."""
    found = peak_of(constructor, budget, *sizes)
    assert found["taken"] <= 1.05 * memory_bytes(budget)
    if sizes == BLOCK_OF_7B:
        assert found["passes"] == {"2GiB": 1, "800MiB": 3}[budget]


ON_CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def spread_out(device: str) -> nn.Module:
    """The second block on that device, by accelerate's hooks as ``device_map`` sets them; the rest on the CPU."""
    model = tiny_qwen2()
    hook = AlignDevicesHook(execution_device=device, io_same_device=True, place_submodules=True)
    add_hook_to_module(model.model.layers[1].to(device), hook)
    return model


@pytest.mark.parametrize("stats_device", [None, "cpu"])
@pytest.mark.parametrize("device", ["cpu", ON_CUDA])
@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_bases_are_those_of_one_device(constructor: str, device: str, stats_device: str | None) -> None:
    expected, model = adapted(constructor), adapted(constructor, model=spread_out(device), dtype=None, calibrated=False)
    calibrate(model, BATCHES, options=CalibrationOptions(stats_device=stats_device), progress=False)
    for layer, other in zip(cores_of(model), cores_of(expected), strict=True):
        for X, Y in zip(layer.factors("default")[:2], other.factors("default")[:2], strict=True):
            assert X.device == layer.weight.device
            assert torch.linalg.svdvals(X.cpu().mT @ Y).min() > 0.999


@pytest.mark.parametrize(
    "options",
    [{}, {"tokens": "completion", "weighting": "token_sum"}, {"skip_first": 2}],
    ids=["default", "completion", "skip"],
)
def test_a_pass_reads_nothing_off_the_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(FiniteBatches, "look", lambda self: looked.append(len(self.waiting)))
    model = tiny_qwen2().to("meta")
    model.set_attn_implementation("eager")  # the other one's mask asks on the way whether there is padding
    moments, counted = (
        collect_moments(
            one, BATCHES, attention_names(one), needs=frozenset(MOMENT_NAMES), options=CalibrationOptions(**options)
        )
        for one in (model, tiny_qwen2())
    )
    assert looked[0] == 2 * len(BATCHES)  # once, behind all batches: the flags of both sides of each
    assert {name: layer.num_tokens for name, layer in moments.items()} == {
        name: layer.num_tokens for name, layer in counted.items()
    }


def wide_model() -> PeftModel:
    """Sums of 160 MiB in all and 8 at most."""
    settings = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_key_value_heads": 4}
    return get_peft_model(tiny_qwen2(**settings).cuda(), FrozenCoreConfig(r=4, target_modules="all-linear"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_runs_out_on_the_device_makes_smaller_groups() -> None:
    expected, model = wide_model(), wide_model()
    calibrate(expected, BATCHES, progress=False)  # libraries have their workspaces then
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * 2**20) / total)
    try:
        with pytest.warns(UserWarning, match=r"Out of memory with 28 layers in a pass: calibration goes on with 14"):
            calibrate(model, BATCHES, progress=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for layer, other in zip(cores_of(model), cores_of(expected), strict=True):
        for X, Y in zip(layer.factors("default")[:2], other.factors("default")[:2], strict=True):
            assert torch.linalg.svdvals(X.mT @ Y).min() > 0.999


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def take(constructor: str, budget: str, hidden: int, intermediate: int, num_layers: int) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=num_layers,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = get_peft_model(
        Qwen2ForCausalLM(config),
        FrozenCoreConfig(r=16, constructor=constructor, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    batches = batches_of(draw_examples(num_examples=8, seed=0, longest=16), 4)
    for batch in batches:  # what a plain pass takes is no extra
        embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        with model.disable_adapter():
            model(inputs_embeds=embeds, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss.backward()
    warm = get_peft_model(tiny_qwen2(), FrozenCoreConfig(r=4, constructor=constructor))
    calibrate(warm, batches, progress=False)  # library code that is paged in is no sum
    truncated_svd(torch.randn(600, 600), 16)
    plans: list[tuple[list[tuple[str, ...]], int]] = []
    plan = calibration.plan_passes
    calibration.plan_passes = lambda *args, **options: plans.append(plan(*args, **options)) or plans[-1]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    options = CalibrationOptions(memory_budget=budget)
    calibrate(model, batches, options=options, progress=False)
    taken = resident("VmHWM") - before
    print(json.dumps({"passes": len(plans[0][0]), "taken": taken}))


if __name__ == "__main__":
    take(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
