"""The command: what a user types, sees, and gets as exit status."""

from __future__ import annotations

import io
import json
import re
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console, Group

from frozencore.cli import app as cli
from frozencore.cli.run_summary import recipe_in_words, sample_lines
from frozencore.errors import ArtifactError
from frozencore.tune.config import make_config
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.training.trainer import CompletionTrainer
from frozencore.words import counted
from small_tenants import inputs_of

FEW = ["--model", str(pocket_model_path()), "--task", "pocket-sentiment", "--rank", "4", "--calibration-size", "16"]
SHORT = [
    *FEW,
    "--batch-size",
    "8",
    "--accumulation",
    "1",
    "--num-train",
    "32",
    "--num-evaluation",
    "20",
    "--epochs",
    "1",
]


def test_tune_shows_the_score_and_writes_the_record(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    status, out, _ = command("tune", *SHORT, "--out", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert status == 0
    assert f"{100 * record['accuracy']:.1f}" in out
    assert "256 trained values" in out
    assert "eats the majority class" in out or "Does not beat" in out


def test_the_lines_of_a_run_add_up_to_the_whole_and_to_what_its_record_says(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, out, _ = command("tune", *SHORT, "--out", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    seconds: dict[str, float] = {}
    for label, spent in re.findall(r"^([A-Z][a-z ]+): \d+ in ([\d.]+) s", out, flags=re.MULTILINE):
        seconds[label] = seconds.get(label, 0.0) + float(spent)
    whole, rest = map(float, re.search(r"In all: ([\d.]+) s, ([\d.]+) s of it", out).groups())  # type: ignore[union-attr]
    assert {"Start", "Load model and rows", "Hash the model", "Calibrate", "Train"} <= seconds.keys()
    assert sum(seconds.values()) + rest == pytest.approx(whole, abs=1.0)  # each is rounded
    assert seconds["Calibrate"] + seconds["Build the bases"] == pytest.approx(record["calibration_s"], abs=0.5)


def test_calibrate_then_inspect_shows_what_the_basis_captured(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    status, out, _ = command("calibrate", *FEW, "--out", tmp_path / "c")
    assert status == 0
    assert float(re.search(r"Calibration, ([0-9.]+) s", out)[1]) > 0  # type: ignore[index]
    assert "16 layers (--all-layers shows each)" in out
    assert {"effective", "σ₁"} <= {line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")}
    assert "layers.3.self_attn.q_proj" in command("calibrate", *FEW, "--out", tmp_path / "d", "--all-layers")[1]
    moments = tmp_path / "c" / "moments.safetensors"
    status, out, _ = command("inspect", tmp_path / "c" / "adapter", "--moments", moments, "--json")
    reports = json.loads(out)
    assert status == 0
    assert len(reports) == 16
    assert list(reports) == sorted(reports, key=counted)
    assert all(layer["capture"]["correlation_share"] == pytest.approx(1, abs=1e-3) for layer in reports.values())
    status, out, _ = command("inspect", tmp_path / "c" / "adapter", "--against", tmp_path / "c" / "adapter")
    assert status == 0
    assert "1.000" in out
    assert "coher. P: coherence of P: largest leverage of an output" in out
    assert "16 layers; 256 trained values" in out
    assert "PᵀP" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", *SHORT[:2], "--task", "svmp", "--out", "x"], "Did you mean 'svamp'"),
        (["tune", *SHORT, "--method", "fca", "--out", "x"], "Did you mean 'fcca'"),
        (["train", *SHORT, "--out", "x"], "There is no verb 'train'. Known: tune"),
        (["--debug", "evalute", "--out", "x"], "There is no verb 'evalute'. Did you mean 'evaluate'"),
        (["tune", *SHORT, "--lora-r", "8", "--out", "x"], "No such option|There is no flag --lora-r"),
        (
            ["tune", *SHORT, "--learning_rate=1e-3", "--out", "x"],
            "no flag --learning_rate. Did you mean --learning-rate",
        ),
        (
            ["tune", *FEW, "--learing-rate", "1", "--out", "x"],
            r"no flag --learing-rate\. Did you mean --learning-rate\?$",
        ),
        (["adapter", "pack", "x", "--bais", "x", "--out", "x"], r"no flag --bais\. Did you mean --basis\?$"),
        (["tune", *SHORT, "--rank", "0", "--out", "x"], "--rank"),
        (["tune", *SHORT, "--targets", "nothing", "--out", "x"], "matches no layer"),
        (["tune", *SHORT[:2], "--data", "none.jsonl", "--out", "x"], "no file none.jsonl"),
        (
            ["tune", "--model", "Nobody/has-this", "--task", "pocket-math", "--out", "x"],
            "hub cannot be reached|no such",
        ),
        (["tune", *SHORT, "--max-length", "8", "--out", "x"], "longer than the limit of 8 tokens"),
        (["calibrate", *FEW, "--method", "random", "--out", "x"], "reads no calibration data"),
        (["inspect", "."], "has no adapter_config.json"),
        (["tune", *SHORT, "--seed", "-1", "--out", "x"], "--seed"),
        (["tune", *SHORT, "--targets", ",", "--out", "x"], "--targets"),
        (["tune", *SHORT, "--method", "lora", "--alpha", "64", "--out", "x"], "does not read alpha"),
    ],
)
def test_bad_input_is_one_line_and_status_two(  # type: ignore[no-untyped-def]
    command, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = command(*words)
    assert status == 2
    assert err.startswith("frozencore: ")
    assert err.count("\n") == 1
    assert re.search(message, err)
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_too_long_are_refused_or_left_out_and_counted(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = [{"prompt": f"Tom has {i} cats .", "completion": " two cats"} for i in range(10)]
    rows += [{"prompt": "Tom has cats . " * 9, "completion": " one"}, {"prompt": "Tom", "completion": " has" * 30}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["tune", *FEW[:2], "--data", tmp_path / "rows.jsonl", "--method", "random", "--max-length", "16"]
    for cuts in ([], ["--truncate"]):
        status, _, err = command(*words, *cuts, "--out", tmp_path / "run")
        assert (status, err.count("\n")) == (2, 1)
        assert "--skip-long" in err
        assert not (tmp_path / "run").exists()
    status, out, _ = command(*words, "--truncate", "--skip-long", "--out", tmp_path / "run")
    assert status == 0
    assert "10 rows to train on, 1 to score, 1 prompt cut, 1 row skipped as too long" in out
    assert "Read 12 rows by prompt and completion; 1 left out (too long)." in out
    used = json.loads((tmp_path / "run" / "result.json").read_text())["rows"]
    assert (used["cut"], used["skipped"], used["trained"] + used["scored"]) == (1, 1, 11)


def test_a_dry_run_says_what_would_be_read_and_taken_and_writes_nothing(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = [{"prompt": f"Tom has {i} cats .", "completion": " two cats"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["tune", *FEW[:2], "--data", tmp_path / "rows.jsonl", "--rank", "4", "--epochs", "2", "--batch-size", "3"]
    status, out, err = command(*words, "--accumulation", "2", "--out", tmp_path / "run", "--dry-run")
    assert (status, err) == (0, "")
    assert not (tmp_path / "run").exists()
    prepared = inputs_of(make_config(model=FEW[1], data=tmp_path / "rows.jsonl"))
    lengths = [len(row.input_ids) for row in prepared.rows.train]
    with_loss = 18 * (1 + len(prepared.encoder.tokenizer(" two cats", add_special_tokens=False)["input_ids"]))
    assert f"18 rows to train on: {sum(lengths)} tokens, {with_loss} of them with loss; " in out
    assert f"{max(lengths)} at most (limit 512)" in out
    assert "2 rows to score: " in out
    assert "6 steps of 6 rows, 3 at a time in 2 epochs; learning rate 0.01" in out
    places = "q_proj, k_proj, v_proj, o_proj"
    assert f"fcca: 256 trained values in {places} (3,072 bytes of state held while training), about " in out
    uncounted = command(*words, "--out", tmp_path / "run", "--dry-run", "--method", "dora")
    assert "dora: " in uncounted[1]
    asked = out.partition("as a file for --config\n")[2].partition("\n\n")[0]
    few = {"rank": 4, "epochs": 2, "batch-size": 3, "accumulation": 2}
    assert yaml.safe_load(asked) == {"model": FEW[1], "data": str(tmp_path / "rows.jsonl"), **few}
    assert re.fullmatch(r"Tom has \d+ cats \.⟦ two cats<\|endoftext\|>⟧", out.splitlines()[-1])


def test_samples_are_shown_in_full_and_steps_in_rows(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    long = " ".join(f"word{i}" for i in range(60))
    sample = {"id": "row-1", "prompt": "What?", "wanted": long, "before": "", "after": "[b]x[/x]"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    console = Console(width=80, file=io.StringIO())
    console.print(Group(*sample_lines(tmp_path / "samples.jsonl")))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert " ".join(shown.split()).count(long) == 1
    assert "[b]x[/x]" in shown
    once, apart = ({"batch_size": 8 // n, "accumulation": n, "learning_rate": 1, "warmup": 0} for n in (1, 4))
    assert recipe_in_words(3, once).startswith("3 steps of 8 rows; ")
    assert recipe_in_words(3, apart).startswith("3 steps of 8 rows, 2 at a time; ")


def test_an_empty_file_and_a_file_without_labels_are_one_line(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for content, message in (
        ("", "holds no rows"),
        ('{"prompt": "a", "completion": ""}\n', "row-1"),
        ('{"a": 1}\n', "row 1"),
    ):
        (tmp_path / "rows.jsonl").write_text(content)
        status, _, err = command("tune", *FEW[:2], "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "run")
        assert (status, err.count("\n")) == (2, 1)
        assert message in err
        assert not (tmp_path / "run").exists()


def refuse_by_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")


def refuse_by_machine() -> None:
    torch.empty(2**50)


@pytest.mark.parametrize("refuse", [refuse_by_device, refuse_by_machine])
def test_memory_that_runs_out_in_training_is_one_line(  # type: ignore[no-untyped-def]
    command, refuse: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionTrainer, "compute_loss", lambda *_, **__: refuse())
    status, _, err = command("tune", *SHORT, "--out", tmp_path / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("frozencore: out of memory (")
    assert "smaller --batch-size" in err


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 130
    assert capsys.readouterr().err.startswith("frozencore: interrupted")


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_ctrl_c_in_a_command_is_status_130_and_sigterm_143_and_each_is_one_line(  # type: ignore[no-untyped-def]
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for status, how, end in (
        (130, "interrupted", raising(KeyboardInterrupt())),
        (143, "terminated", lambda: signal.raise_signal(signal.SIGTERM)),
    ):
        monkeypatch.setattr("frozencore_lab.campaign.results.status_lines", lambda _, end=end: end())
        came, _, err = command("campaign", "status", tmp_path)
        assert came == status
        assert err.splitlines()[-1] == f"frozencore: {how}; the same command continues from what is saved"
    signal.signal(signal.SIGTERM, before)


def test_ctrl_c_before_anything_is_saved_does_not_say_that_something_goes_on(  # type: ignore[no-untyped-def]
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frozencore.tune.run.execute", lambda *_, **__: raising(KeyboardInterrupt())())
    monkeypatch.setattr("frozencore.tune.evaluation.evaluate.evaluate", lambda *_: raising(KeyboardInterrupt())())
    for words, kept in (
        (["tune", *SHORT], ".found/base-score.json"),
        (["evaluate", *FEW[:4]], "base/pocket-sentiment/result.json"),
    ):
        out = tmp_path / words[0]
        status, _, err = command(*words, "--out", out, *(["--resume"] if words[0] == "tune" else []))
        assert status == 130
        said = "frozencore: interrupted; nothing is saved yet; the same command starts from the beginning"
        assert err.splitlines()[-1] == said
        (out / kept).parent.mkdir(parents=True)
        (out / kept).write_text("{}")
        _, _, err = command(*words, "--out", out, *(["--resume"] if words[0] == "tune" else []))
        assert err.splitlines()[-1].endswith(" continues from what is saved")


def test_ctrl_c_in_a_verb_that_keeps_nothing_does_not_say_that_it_goes_on(  # type: ignore[no-untyped-def]
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "tune").mkdir()  # an adapter that is called as a verb
    (tmp_path / "tune" / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("frozencore.adapter.folders.merge_adapters", stop)
    monkeypatch.setattr("frozencore.adapter.folders.unpack_adapter", stop)
    for words in (("merge", "tune", "--output", "run"), ("adapter", "unpack", "tune", "--output", "run")):
        status, _, err = command(*words)
        assert status == 130
        assert err.splitlines()[-1] == "frozencore: interrupted; the same command starts from the beginning"


def test_debug_shows_the_traceback_of_what_is_one_line_without_it(  # type: ignore[no-untyped-def]
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROZENCORE_DEBUG", "")  # so that it is put back
    assert command("inspect", tmp_path)[0] == 2
    monkeypatch.setattr(sys, "argv", ["frozencore", "--debug", "inspect", str(tmp_path)])
    with pytest.raises(ArtifactError, match="has no adapter_config.json"):
        cli.main()


@pytest.mark.parametrize(
    "error", [PermissionError(13, "No", "/some/file"), torch.OutOfMemoryError("CUDA out of memory.")]
)
def test_debug_also_shows_the_traceback_of_what_the_system_refuses(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", raising(error))
    monkeypatch.delenv("FROZENCORE_DEBUG", raising=False)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("FROZENCORE_DEBUG", "1")
    with pytest.raises(type(error)) as caught:
        cli.main()
    assert caught.value is error


def test_an_error_that_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    monkeypatch.setattr(cli, "app", raising(error))
    monkeypatch.delenv("FROZENCORE_DEBUG", raising=False)
    with pytest.raises(RuntimeError) as caught:
        cli.main()
    assert caught.value is error


def test_what_a_run_warned_of_is_shown_and_kept_in_its_record(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    wide = ["--method", "random", "--rank", "96", "--targets", "k_proj"]  # k_proj has 80 rows
    status, out, _ = command("tune", *SHORT, *wide, "--out", tmp_path / "run")
    assert status == 0
    (warning,) = json.loads((tmp_path / "run" / "result.json").read_text())["warnings"]
    assert "4 of 4 layers are narrower than the rank" in warning
    assert f"Warning: {warning}" in " ".join(out.split())


@pytest.mark.filterwarnings("ignore:'frozencore.cli.console' found in sys.modules")
def test_tables_are_as_wide_as_the_terminal_or_as_columns_and_wide_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, forced, width in (("70", "1", 70), ("70", "", 70), (None, "", 160)):
        monkeypatch.setenv("FORCE_COLOR", forced)
        if columns is None:
            monkeypatch.delenv("COLUMNS")
        else:
            monkeypatch.setenv("COLUMNS", columns)
        assert runpy.run_module("frozencore.cli.console")["console"].width == width


@pytest.mark.filterwarnings("ignore:'frozencore.cli.app' found in sys.modules")
def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["frozencore", "schema"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("frozencore.cli.app", run_name="__main__")
    assert not exit_.value.code
    assert json.loads(capsys.readouterr().out)["title"] == "Campaign"
