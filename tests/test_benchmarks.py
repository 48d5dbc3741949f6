"""The benchmarks run at their tiniest and write what they promise; docs/cost.md holds the numbers of its files."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from engine_process import environment_of
from frozencore.tune.pocket import pocket_model_path
from places import ROOT, SOURCES

BENCHMARKS = ROOT / "benchmarks"

GPU_SECTIONS = ("graphs", "compile", "race", "one batch", "trained together", "kernels")  # the most important first
PROMISED: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "step": (("--quick",), {"rank", "rounds", "rows", "adapter_of_144_layers"}),
    "calibration": (("--quick",), {"scale", "rank", "rows"}),
    "refreshing": (("--quick",), {"rows", "rows_trained"}),
    "svd": (("--quick",), {"rank", "decay", "rows"}),
    "growth": (("--quick",), {"plan", "rates", "constants", "calibration", "step"}),
    "ranks": (("--quick",), {"scale", "rows"}),
    "memory": (("--quick",), {"rows"}),
    "many_training": (("--quick",), {"rows", "growth", "rounds"}),
    "many_commands": (("--quick",), {"rows", "size", "rounds"}),
    "tenants": (("--quick",), {"keep", "batch"}),
    "per_example": (("--quick",), {"ranks", "rounds", "rows"}),
    "row_scores": (("--quick",), {"settings", "flipped", "halves", "chosen"}),
    "scale": (("--quick",), {"rates", "plan", "rows", "one_rate"}),
    "smollm2": (("--quick",), {"dtypes", "waterfall", "rounds"}),
    "smollm2_scores": (("--quick",), {"num_rows", "accuracy", "accuracy_per_character", "published_per_character"}),
}
SLOW = {
    "step", "refreshing", "calibration", "svd", "ranks", "memory", "many_training", "many_commands", "tenants",
    "per_example", "smollm2", "scale", "row_scores",
}  # fmt: skip
EVERYWHERE = {"benchmark", "provenance"}


def run(script: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(BENCHMARKS / f"{script}.py"), *map(str, options)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=280, check=False)


def in_a_fork(name: str, folder: Path, *options: str | Path) -> forked.Ended:
    """As ``run``, without the seconds of a new process; for what does not measure its own."""
    return forked.ended(forked.script(BENCHMARKS / f"{name}.py", *options), folder)


def results_of(script: str, folder: Path) -> dict[str, Any]:
    """The results of its quick mode."""
    words = (*PROMISED[script][0], "--out", folder / "found.json")
    if script in SLOW:
        done = run(script, *words)
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        ended = in_a_fork(script, folder, *words)
        assert ended.status == 0, ended.err[-2000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PROMISED]
)
def test_the_quick_mode_writes_the_promised_keys(script: str, tmp_path: Path) -> None:
    if script == "per_example":
        pytest.importorskip("opacus")
    found = results_of(script, tmp_path)
    missing = (PROMISED[script][1] | EVERYWHERE) - found.keys()
    assert not missing
    for rows in ("rows", "calibration", "step"):
        assert found.get(rows) is None or len(found[rows]) > 0


@pytest.mark.slow
def test_federated_averaging_is_compared_at_equal_steps_and_adds_an_error_to_loras_alone(tmp_path: Path) -> None:
    python, own = environment_of("flower") / "bin" / "python", ("--quick", "--folder", "runs", "--out", "found.json")
    words = [str(python), str(BENCHMARKS / "federated_smollm2.py"), *own]
    environment = os.environ | {"PYTHONPATH": str(SOURCES)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {(run["seed"], len(run["losses"])) for run in found["rows"]} == {(42, 2), (43, 2)}
    assert len(found["rows"]) == 2 * len({run["contestant"] for run in found["rows"]})
    for run in found["rows"]:
        assert ("LoRA" in run["contestant"]) == (max(run["averaging_errors"]) > 1e-3)
        assert 4 * run["values"] < run["bytes"]


@pytest.mark.slow
def test_the_gpu_benchmark_measures_every_section_of_every_model_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pocket model stands in for SmolLM2. It is missing at first, so that only its sections are measured again."""
    out = tmp_path / "found.json"
    words = ("--tiny", "--models", "Qwen2.5-3B", "SmolLM2-135M", "--sections", *GPU_SECTIONS, "--out", out)
    ended = in_a_fork("gpu", tmp_path, *words, "--smollm2", tmp_path / "no-model")
    assert ended.status == 0, ended.err[-2000:]
    before = json.loads(out.read_text())["models"]
    assert all("error" in section for section in before["SmolLM2-135M"].values())
    ended = in_a_fork("gpu", tmp_path, *words, "--smollm2", pocket_model_path())
    assert ended.status == 0, ended.err[-2000:]
    found = json.loads(out.read_text())
    assert found["models"]["Qwen2.5-3B"] == before["Qwen2.5-3B"]
    wanted = {"CUDA graphs", *GPU_SECTIONS[1:]}
    for sections in found["models"].values():
        assert sections.keys() == wanted
        assert not [name for name, section in sections.items() if "error" in section]
        assert {name for name, section in sections.items() if "skipped" in section} == {"CUDA graphs", "kernels"}
        assert sections["race"].keys() == {"floor", "lora", "dora", "pissa", "frozencore"}
        assert "calibration_build_s" in sections["race"]["frozencore"]["runs"][0]
        assert sections["compile"].keys() == {"blocks", "floor", "frozencore", "lora", "dora"}
        assert sections["trained together"]["floor"].keys() == {"2 together", "3 together"}
    assert found["models"]["Qwen2.5-3B"]["race"]["frozencore"]["num_trainable"] == 2 * 4 * 16**2
    assert "eager step / LoRA" in ended.out
    rows = loaded("speed_tables", monkeypatch).gpu_more(found).splitlines()
    assert sum(row.startswith("| Qwen2.5-3B | ") for row in rows) == 5


def test_the_gpu_benchmark_names_what_its_budget_leaves_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = loaded("gpu", monkeypatch)
    order = gpu.plan(["a", "b"], list(gpu.SECTIONS))
    assert order[0] == ("a", "graphs")
    assert order.index(("b", "race")) < order.index(("a", "one batch"))
    report = gpu.Report(None, {"device": "cpu"})
    left = gpu.measure(order, gpu.Stage("cpu", gpu.TINY, None, None, False), 5.0, report)
    assert left == [f"{model}, {section}" for model, section in order]


def test_a_missed_target_of_a_gpu_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"floor": {"step_s": 1.0}, "lora": {"step_s": 1.5}, "frozencore": {"step_s": 1.05}}
    slow = steps | {"frozencore": {"step_s": 1.6}}
    found = {
        "models": {"one": {"CUDA graphs": steps, "compile": steps}, "two": {"CUDA graphs": steps, "compile": slow}}
    }
    lines = loaded("speed_tables", monkeypatch).gpu_targets(found).splitlines()[2:]
    assert lines == [
        "| compiled step / LoRA | <= 1 | 0.700 | 1.067 | missed |",
        "| step as a CUDA graph / floor | <= 1.06 | 1.050 | 1.050 | reached |",
        "| step as a CUDA graph / LoRA | <= 0.8 | 0.700 | 0.700 | reached |",
    ]


@pytest.mark.slow
def test_bytes_sent_are_those_of_the_formula_but_for_the_flags(tmp_path: Path) -> None:
    found = results_of("ranks", tmp_path)
    one, two = found["rows"]
    assert one["sent_by_payload_bytes"] == one["sent_by_formula_bytes"] == 0
    flags = two["sent_by_payload_bytes"] - two["sent_by_formula_bytes"]
    assert 0 <= flags <= 20 * 8 * 2  # a long per rank and stage
    assert two["sent_by_formula_bytes"] > 20 * flags


@pytest.mark.slow
def test_everything_together_merges_its_parts_and_judges_the_targets(tmp_path: Path) -> None:
    out, parts = tmp_path / "machine.json", ("step", "growth")
    done = run("bench", "--quick", "--only", *parts, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found.keys() >= {"machine", "parts", "targets", "time_s", "provenance"}
    assert found["parts"].keys() == set(parts)
    verdicts = {verdict["what"]: verdict["is_reached"] for verdict in found["targets"]}
    assert verdicts["gradient + optimiser bytes a core value"] is True
    assert verdicts["calibration / PEFT LoRA-GA"] is None  # that part did not run
    assert "gradient + optimiser bytes a core value" in done.stdout


def test_the_pages_hold_the_numbers_of_their_files(tmp_path: Path) -> None:
    done = in_a_fork("pages", tmp_path, "--check")
    assert done.status == 0, done.out + done.err[-2000:]


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of benchmarks/, which is no package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_counts_are_those_of_the_paper_and_of_the_model_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    projection = loaded("projection", monkeypatch)
    assert projection.core_values(projection.QWEN_3B) == 36_864
    assert projection.lora_values(projection.QWEN_3B) == 7_372_800
    tied = projection.QWEN_3B.vocabulary * projection.QWEN_3B.width
    assert projection.QWEN_3B.weights() - tied == pytest.approx(3.09e9, rel=0.01)
    assert projection.QWEN_7B.weights() == pytest.approx(7.62e9, rel=0.01)
    assert projection.LLAMA_70B.weights() == pytest.approx(70.6e9, rel=0.01)


def test_the_fit_finds_the_constants_that_times_were_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = loaded("fitting", monkeypatch)
    operations, calls = [1e9, 5e9, 2e10, 1e11], [10.0, 400.0, 30.0, 700.0]
    times = [2e-11 * n + 1e-4 * k for n, k in zip(operations, calls, strict=True)]
    found = fitting.fit({"per_operation_s": operations, "per_call_s": calls, "unused_s": [1.0] * 4}, times)
    assert found["per_operation_s"] == pytest.approx(2e-11, rel=1e-6)
    assert found["per_call_s"] == pytest.approx(1e-4, rel=1e-6)
    assert found["largest_error"] < 1e-9


def test_a_target_whose_part_failed_counts_as_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = loaded("targets", monkeypatch)
    parts = {
        "svd": {"error": "not finished after 300 s"},
        "memory": {"rows": [{"share": 0.7}, {"share": 1.06}]},
        "calibration": {"rows": [{"contestant": "floor", "median_s": 2.0}]},
        "step": {"adapter_of_144_layers": {"swap_prepared_s": 0.0005}, "rows": []},
    }
    verdicts = targets.check_targets(parts)
    assert len(verdicts) == len(targets.TARGETS)
    known = {verdict.what: verdict.is_reached for verdict in verdicts if verdict.is_reached is not None}
    assert known == {"peak memory of calibration / its budget": False, "swap of a prepared core, 144 layers": True}


def test_a_search_ends_where_the_best_rate_has_others_on_both_sides_or_at_the_most_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best_rate = loaded("harness", monkeypatch).best_rate
    for best, most, expected, tried in (
        (1.0, 9, 1.0, [0.5, 1.0, 2.0]), (8.0, 9, 8.0, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]),
        (0.25, 9, 0.25, [0.5, 1.0, 2.0, 0.25, 0.125]), (8.0, 4, 4.0, [0.5, 1.0, 2.0, 4.0]),
    ):  # fmt: skip
        asked: list[float] = []

        def losses_of(rates: list[float], asked: list[float] = asked, best: float = best) -> dict[float, float]:
            asked += rates
            return {rate: abs(math.log(rate / best)) for rate in rates}

        assert best_rate(1.0, losses_of, most) == (expected, pytest.approx(abs(math.log(expected / best))))
        assert asked == tried
