"""The final screen of a run, on records with known numbers and on files of each form."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from rich.console import Console
from scipy.stats import binomtest

from adapted import adapted
from frozencore import export_lora, pack_adapter
from frozencore.cli.run_screen import run_summary, sample_lines, size_lines
from frozencore.files.adapter_folder import WEIGHTS_FILE
from frozencore.files.atomic_write import read_lines, write_lines
from frozencore.text import wilson
from frozencore.tune.config import make_config
from small_runs import made_up_record
from tiny import tiny_qwen2


def shown(renderable: object) -> str:
    console = Console(width=220, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


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


def on_rows(trained: int, scored: int) -> str:
    used = {"trained": trained, "scored": scored, "scored_on": "evaluation", "validation_from": "train"}
    return shown(run_summary(made_up_record({"task": "svamp"}, accuracy=1.0, rows=used)))


def test_an_accuracy_says_on_how_many_rows_and_never_that_a_few_right_ones_are_exact() -> None:
    text = on_rows(135, 15)
    assert "accuracy, % of 15 rows (95 % interval)" in text
    assert "100.0 (79.6 to 100.0)" in text
    assert "±" not in text


def test_a_run_on_few_rows_says_so_and_what_to_do() -> None:
    assert "Few training rows (9): the adapter may only repeat them" in on_rows(9, 1)
    assert "Give more rows" in on_rows(31, 3)
    assert "Few" not in on_rows(32, 3)


def test_a_run_on_ones_own_rows_shows_its_loss_and_no_accuracy() -> None:
    config = {"model": "somewhere/model", "data": "rows.jsonl"}
    record = made_up_record({"task": None}, config=config, accuracy=..., accuracy_before=..., score=...)
    text = shown(run_summary(record))
    assert "fcca on rows.jsonl" in text
    assert f"1.800 │ {record.held_out_loss:.3f}" in text
    assert "accuracy" not in text


@pytest.mark.parametrize("method", ["fcca", "pissa"])
def test_a_run_says_the_recipe_that_its_method_chose(method: str) -> None:
    recipe = make_config(model="pocket", task="svamp", method=method)
    own = {"learning_rate": recipe.resolved_learning_rate, "warmup": recipe.resolved_warmup}
    resolved = {"targets": "all-linear", "max_length": 512, "recipe": {**own, "batch_size": 1, "accumulation": 8}}
    text = shown(run_summary(made_up_record({"task": "svamp"}, method=method, resolved=resolved)))
    rate = {"fcca": "0.01", "pissa": "0.0002"}[method]
    assert f"262 steps of 8 rows, 1 at a time; learning rate {rate}, warm-up 0.1 of them." in text


def test_a_run_says_how_it_trained_and_what_it_holds() -> None:
    recipe = {"learning_rate": 5e-3, "warmup": 0.1, "batch_size": 1, "accumulation": 8}
    resolved = {"targets": "all-linear", "max_length": 512, "recipe": recipe}
    text = shown(run_summary(made_up_record({"task": "svamp"}, resolved=resolved)))
    assert "262 steps of 8 rows, 1 at a time; learning rate" in text
    assert "36,864 trained values in all-linear; 442.4 KB of state held while training; saved in 29.6 MB" in text


def test_a_run_says_which_step_it_kept_and_why() -> None:
    scores = [
        {"step": 88, "held_out_loss": 0.5, "accuracy": 0.75},
        {"step": 176, "held_out_loss": 0.4, "accuracy": 0.7},
    ]
    kept = {"every": "epoch", "rows": 70, "kept_step": 88, "by": "accuracy", "scores": scores, "time_s": 2.5}
    text = shown(run_summary(made_up_record({"task": "svamp"}, selection=kept)))
    assert "Kept step 88 of 262: accuracy 75.0 % on 70 validation rows, the best of 2 scores, which took 2.5 s." in text
    by_loss = [{"step": 262, "held_out_loss": 0.25}]
    kept = {"every": 300, "rows": 4, "kept_step": 262, "by": "held_out_loss", "scores": by_loss, "time_s": 1.0}
    assert "Kept step 262 of 262: loss 0.250 on 4" in shown(
        run_summary(made_up_record({"task": "svamp"}, selection=kept))
    )
    none = {"every": "epoch", "rows": 0, "kept_step": 262}
    text = shown(run_summary(made_up_record({"task": "svamp"}, selection=none)))
    assert "There are no validation rows beside the training rows: the last of 262 steps is kept." in text
    assert "step" not in shown(run_summary(made_up_record({"task": "svamp"})))


def falling(losses: list[float], **recipe: object) -> str:
    training = {"num_steps": len(losses), "final_loss": losses[-1], "losses": losses}
    own = {"learning_rate": 1e-2, "warmup": 0.1, "batch_size": 8, "accumulation": 1, "epochs": 3}
    resolved = {"targets": "all-linear", "max_length": 512, "recipe": own | recipe}
    return shown(run_summary(made_up_record({"task": "svamp"}, resolved=resolved, training=training)))


def test_a_run_whose_loss_was_still_falling_says_so_and_what_to_try() -> None:
    said = falling([4.0 * 0.9**step for step in range(40)])
    assert "The training loss was still falling: " in said
    assert "Try --epochs 6 or a larger --lr." in " ".join(said.split())


def test_a_run_whose_loss_no_longer_falls_or_only_swings_says_nothing_of_it() -> None:
    flat = [4.0 * 0.5**step + 0.3 for step in range(40)]
    swinging = [0.3 + 0.25 * (-1) ** step - 0.001 * step for step in range(40)]
    for losses in (flat, swinging, flat[:4]):
        assert "falling" not in falling(losses)


def test_a_perfect_run_is_not_told_to_train_longer() -> None:
    losses = [4.0 * 0.9**step for step in range(40)]
    training = {"num_steps": 40, "final_loss": losses[-1], "losses": losses}
    own = {"learning_rate": 1e-2, "warmup": 0.1, "batch_size": 8, "accumulation": 1, "epochs": 3}
    resolved = {"targets": "all-linear", "max_length": 512, "recipe": own}
    for accuracy, said in ((1.0, False), (0.9, True)):
        record = made_up_record({"task": "svamp"}, resolved=resolved, training=training, accuracy=accuracy)
        assert ("still falling" in shown(run_summary(record))) is said


UNITS = {"KB": 1000, "MB": 10**6}
HEADERS = 0.2  # share of a small file that names and shapes take


def sizes(line: str) -> list[float]:
    return [float(number) * UNITS[unit] for number, unit in re.findall(r"([\d.]+) (KB|MB)", line)]


def test_a_cores_size_is_that_of_its_file_of_its_pack_and_of_its_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = Path("run/adapter")
    adapted("fcca", trained=True, r=16).save_pretrained(str(adapter))
    (line,) = size_lines(adapter)
    values = int(re.search(r"Size of ([\d,]+) trained values", line)[1].replace(",", ""))  # type: ignore[index]
    pack_adapter(adapter, None, "shared/run")
    export_lora(adapter, "lora")
    files = [adapter / WEIGHTS_FILE, Path("shared/run") / WEIGHTS_FILE, Path("lora") / WEIGHTS_FILE]
    for said, file in zip(sizes(line), files, strict=True):
        assert said == pytest.approx(file.stat().st_size, rel=HEADERS)
    assert files[1].stat().st_size == pytest.approx(4 * values, rel=HEADERS)
    assert list(size_lines(Path("shared/run"))) == [
        f"Size: {files[1].stat().st_size / 1000:.1f} KB, cores alone on their basis."
    ]


def test_another_methods_size_is_that_of_its_file(tmp_path: Path) -> None:
    get_peft_model(tiny_qwen2(), LoraConfig(target_modules=["q_proj"])).save_pretrained(str(tmp_path))
    (line,) = size_lines(tmp_path)
    assert line == f"Size: {(tmp_path / WEIGHTS_FILE).stat().st_size / 1000:.1f} KB."
