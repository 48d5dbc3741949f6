"""Sizes, plans, and the memory that calibration really takes under a budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from peft import PeftModel

from adapted import BATCHES, DATA_DRIVEN, adapted, cores_of
from frozencore import CalibrationOptions, calibrate, frozen_core_layers
from frozencore.adapter.calibrate import layer_costs, targets_of
from frozencore.calibration.budget import LayerCost, PassPlan, memory_bytes, plan_passes, smallest_budget
from frozencore.errors import ConfigError, DataError
from places import SOURCES, TESTS
from tiny import tiny_qwen2


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5kib", 1536),
        (" 2 tb ", 2 * 10**12),
        ("7", 7),
        (7, 7),
        ("7B", 7),
    ],
)
def test_a_size_is_read(size: int | str, expected: int) -> None:
    assert memory_bytes(size) == expected


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("size", ["", "GiB", "8 gallons", "-3GB", "0", 0, -1, "1e9", "8GiB 2", True, 1.5j, [1]])
def test_what_is_no_size_is_refused_in_one_line(size: object) -> None:
    with pytest.raises(ConfigError, match='memory budget is a positive size such as "8GB"') as caught:
        CalibrationOptions(memory_budget=size)
    assert "\n" not in str(caught.value)


def exact(sums: int, **others: int) -> LayerCost:
    return LayerCost(**{"sums": sums, "waiting": 0, "passing": 0, "building": 0, "basis": 0, **others})


def test_groups_are_neighbours_and_as_few_as_fit() -> None:
    costs = {name: exact(size) for name, size in zip("abcde", (4, 4, 2, 6, 3), strict=True)}
    assert plan_passes(costs, 100) == PassPlan((("a", "b", "c", "d", "e"),), peak_bytes=19)
    assert plan_passes(costs, 10).groups == (("a", "b", "c"), ("d", "e"))
    assert plan_passes(costs, 100, group_size=2).groups == (("a", "b"), ("c", "d"), ("e",))
    assert plan_passes(costs, 10).num_passes == 2


def test_every_kind_of_memory_counts() -> None:
    costs = {"a": exact(4, waiting=2, passing=3, building=1, basis=1), "b": exact(4, waiting=2, passing=1, building=9)}
    assert plan_passes(costs, 1000).peak_bytes == 1 + 8 + 9  # the dearer of 2 + 2 + 3 and 9
    assert plan_passes(costs, 15).groups == (("a",), ("b",))


def test_an_impossible_budget_names_the_smallest_that_works() -> None:
    costs = {"a": exact(5), "b": exact(400 * 2**20), "c": exact(7)}
    smallest = smallest_budget(costs)
    with pytest.raises(ConfigError, match=rf'smallest that works is "{-(-smallest // 10**6)}MB"') as caught:
        plan_passes(costs, 2**20)
    assert "\n" not in str(caught.value)
    assert plan_passes(costs, smallest).num_passes >= 3
    with pytest.raises(ConfigError):
        plan_passes(costs, smallest - 1)


def costs_of(model: PeftModel) -> dict[str, LayerCost]:
    targets = targets_of(frozen_core_layers(model, "default"), "default")
    return layer_costs(model, model.peft_config["default"], targets, BATCHES)


@pytest.mark.parametrize("constructor", DATA_DRIVEN)
def test_a_budget_that_takes_several_passes_gives_the_same_bytes(constructor: str) -> None:
    one, several = adapted(constructor), adapted(constructor, calibrated=False)
    examples: list[int] = []
    costs = costs_of(several)
    plans = {size: plan_passes(costs, size) for size in range(smallest_budget(costs), 2**20, 1024)}
    budget = next(size for size, plan in plans.items() if plan.num_passes > 1)
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
            peaks[num_layers, checkpointing] = plan_passes(costs, 2**30).peak_bytes - sums
    assert peaks[8, False] > 2 * peaks[2, False]
    assert peaks[8, True] == peaks[2, True] < peaks[8, False]


@pytest.mark.usefixtures("as_a_user")
def test_what_is_no_batch_is_refused_by_its_number_also_under_a_budget() -> None:
    model = adapted("fcca", calibrated=False)
    with pytest.raises(DataError, match="number 1 is str"):
        calibrate(model, [BATCHES[0], "text"], memory_budget="1GiB", progress=False)
    assert not any(bool(layer.factors("default")[0].any()) for layer in cores_of(model))


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
    words = [sys.executable, str(TESTS / "calibration" / "peak_memory.py"), constructor, budget]
    words += map(str, sizes)
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "passes"), [("2GiB", 1), ("800MiB", 3)])
def test_a_block_of_a_7b_model_stays_within_its_budget(budget: str, passes: int) -> None:
    """All seven linear layers of the real shapes; the peak is VmHWM of a process of its own."""
    found = peak_of("fcca", budget, 3584, 18944, 1)
    assert found["passes"] == passes
    assert found["taken"] <= 1.05 * memory_bytes(budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constructor", "budget"),
    [
        ("fcca", "12MiB"),
        ("fcca", "40MiB"),
        ("rawgrad", "80MiB"),
        ("signgrad", "60MiB"),
        ("eva", "210MiB"),
        ("filora", "225MiB"),
    ],
)
def test_a_small_model_stays_within_its_budget(constructor: str, budget: str) -> None:
    assert peak_of(constructor, budget, 896, 1792, 2)["taken"] <= 1.05 * memory_bytes(budget)
