"""The final screen of a run, on records with known numbers and on files of each form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from scipy.stats import binomtest

from fixtures import shown
from frozencore import export_lora, save_basis
from frozencore.cli.run_screen import run_summary, sample_lines, size_lines
from frozencore.cli.runs import print_tenants
from frozencore.files.atomic_write import read_lines, write_lines
from frozencore.files.names import WEIGHTS_FILE
from frozencore.tune.accuracy import wilson
from small_runs import RECIPE, RESOLVED, made_up_record
from tiny import adapted, tiny_qwen2


def test_samples_with_characters_at_which_python_splits_lines_are_read_back(tmp_path: Path) -> None:
    text = "".join(f"a{mark}b" for mark in "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r")
    samples = [{"id": str(i), "prompt": text, "wanted": text, "before": text, "after": text} for i in range(2)]
    write_lines(tmp_path / "samples.jsonl", samples)
    assert [json.loads(line) for line in read_lines(tmp_path / "samples.jsonl")] == samples
    assert len(list(sample_lines(tmp_path / "samples.jsonl"))) == 4


@pytest.mark.parametrize(("right", "num_rows"), [(0, 1), (1, 1), (15, 15), (7, 15), (0, 40), (499, 500)])
def test_the_interval_of_an_accuracy_is_that_of_scipy(right: int, num_rows: int) -> None:
    wanted = binomtest(right, num_rows).proportion_ci(0.95, method="wilson")
    assert wilson(right / num_rows, num_rows) == pytest.approx((wanted.low, wanted.high), abs=1e-4)


USER_ROWS = {
    "config": {"model": "somewhere/model", "dtype": "auto", "data": "rows.jsonl"},
    "accuracy": ..., "accuracy_before": ..., "score": ...,
}  # fmt: skip


def matches(before: float, after: float) -> dict[str, Any]:
    return {"config": USER_ROWS["config"], "accuracy_before": before, "accuracy": after}


def started_from(adapter: str) -> dict[str, Any]:
    own = resolved()["resolved"]
    return {"resolved": {**own, "started_from": adapter}}


def used(trained: int, scored: int) -> dict[str, Any]:
    rows = {"trained": trained, "scored": scored, "scored_on": "evaluation", "validation_from": "train"}
    return {"accuracy": 1.0, "rows": rows}


def resolved(**recipe: float) -> dict[str, Any]:
    own = {**RECIPE, "batch_size": 1, "accumulation": 8, "epochs": 3}
    return {"resolved": {**RESOLVED, "recipe": own | recipe}}


def trained(losses: list[float], **values: Any) -> dict[str, Any]:
    return {"training": {"num_steps": len(losses), "final_loss": losses[-1], "losses": losses}, **resolved(), **values}


def kept(step: int, *scores: dict[str, float], **values: Any) -> dict[str, Any]:
    scored = {"by": "held_out_loss", "scores": list(scores), "time_s": 2.5} if scores else {}
    return {"selection": {"every": "epoch", "rows": 70, "kept_step": step, **scored, **values}}


CALIBRATION = {
    "collect_s": 0.5, "build_s": 0.1, "num_layers": 4, "num_tokens": 900, "smallest_effective_rank": 8,
    "median_spread": {"input_spread": 3.0},
}  # fmt: skip
FALLING, FLAT = [4.0 * 0.9**step for step in range(40)], [4.0 * 0.5**step + 0.3 for step in range(40)]
SWINGING = [0.3 + 0.25 * (-1) ** step - 0.001 * step for step in range(40)]
SCORES = [{"step": 88, "held_out_loss": 0.5, "accuracy": 0.75}, {"step": 176, "held_out_loss": 0.4, "accuracy": 0.7}]
STILL_FALLING = "The training loss was still falling: "
SHOWN = [
    (used(135, 15), ["% of 15 rows (95 % interval)", "100.0 (79.6 to 100.0)"], ["±", "Few"]),
    (used(9, 1), ["Few training rows (9)"], []),
    (used(31, 3), ["Give more rows"], []),
    (used(32, 3), [], ["Few"]),
    (USER_ROWS, ["fcca on rows.jsonl", "1.800 │ "], ["accuracy"]),
    (matches(0.0, 0.5), ["0.0 before: an answer counts"], ["0.0 after"]),
    (matches(0.0, 0.0), ["0.0 after: an answer counts", "samples.jsonl"], ["0.0 before"]),
    (matches(0.2, 0.0), ["0.0 after"], ["0.0 before"]),
    (matches(0.2, 0.5), [], ["an answer counts"]),
    (started_from("many/anna"), ["The start: many/anna."], []),
    (resolved(), ["262 steps of 8 rows, 1 at a time; learning rate 0.01, warm-up 0.1"], []),
    (resolved(learning_rate=2e-4), ["learning rate 0.0002"], []),
    (resolved(), ["36,864 trained values", "442.4 KB of state held", "saved in 29.6 MB"], ["Kept step"]),
    ({}, ["layers added in "], ["calibration"]),
    ({"calibration": CALIBRATION}, ["calibration "], ["layers added"]),
    (kept(88, *SCORES, by="accuracy"), ["Kept step 88 of 262: accuracy 75.0 % on 70", "the best of 2 scores"], []),
    (kept(262, {"step": 262, "held_out_loss": 0.25}), ["Kept step 262 of 262: loss 0.250 on 70"], []),
    (kept(262, rows=0), ["no validation rows", "the last of 262 steps is kept"], []),
    (trained(FALLING), [STILL_FALLING, "--epochs 6"], []),
    (trained(FALLING, accuracy=0.9), [STILL_FALLING], []),
    (trained(FALLING, accuracy=1.0), [], [STILL_FALLING]),
    *((trained(losses), [], [STILL_FALLING]) for losses in (FLAT, SWINGING, FLAT[:4])),
]  # fmt: skip


@pytest.mark.parametrize(("values", "has", "lacks"), SHOWN)
def test_the_screen_says_what_the_record_holds(values: dict[str, Any], has: list[str], lacks: list[str]) -> None:
    text = " ".join(
        shown(run_summary(made_up_record({"task": None if "config" in values else "svamp"}, **values))).split()
    )
    assert not [words for words in has if words not in text]
    assert not [words for words in lacks if words in text]


UNITS = {"KB": 1000, "MB": 10**6}
HEADERS = 0.2  # share of a small file that names and shapes take


def sizes(line: str) -> list[float]:
    return [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) (KB|MB)", line)]


def test_a_cores_size_is_that_of_its_file_of_a_core_alone_and_of_its_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = Path("run/adapter")
    model = adapted("fcca", trained=True, r=16)
    model.save_pretrained(str(adapter))
    (line,) = size_lines(adapter)
    values = int(re.search(r"Size of ([\d,]+) trained values", line)[1].replace(",", ""))  # type: ignore[index]
    save_basis(model, "shared/basis")
    model.save_pretrained("shared/run")
    export_lora(adapter, "lora")
    files = [adapter / WEIGHTS_FILE, Path("shared/run") / WEIGHTS_FILE, Path("lora") / WEIGHTS_FILE]
    for said, file in zip(sizes(line), files, strict=True):
        assert said == pytest.approx(file.stat().st_size, rel=HEADERS)
    assert files[1].stat().st_size == pytest.approx(4 * values, rel=HEADERS)
    assert list(size_lines(Path("shared/run"))) == [
        f"Size: {files[1].stat().st_size / 1000:.1f} KB, a core alone on its basis."
    ]


def test_another_methods_size_is_that_of_its_file(tmp_path: Path) -> None:
    get_peft_model(tiny_qwen2(), LoraConfig(target_modules=["q_proj"])).save_pretrained(str(tmp_path))
    (line,) = size_lines(tmp_path)
    assert line == f"Size: {(tmp_path / WEIGHTS_FILE).stat().st_size / 1000:.1f} KB."


@pytest.mark.parametrize("style", ["chat", "plain"])
def test_tenants_of_a_chat_template_are_told_where_an_engine_is_asked(
    style: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = made_up_record({"task": "svamp"}, resolved={**RESOLVED, "prompt_style": style})
    assert print_tenants({"anna": record}, Path("many"))
    out = " ".join(capsys.readouterr().out.split())
    assert "Adapters: many/NAME/adapter" in out
    assert ("ask an engine at /v1/chat/completions" in out) == (style == "chat")
