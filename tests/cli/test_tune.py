"""``frozencore tune``: what a run prints and writes, what a dry run says, own rows, and the upload of an adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from huggingface_hub import CommitOperationAdd, HfApi

from fixtures import printed
from frozencore.tune.config import make_config
from frozencore.tune.record import RunRecord
from input_files import write_rows
from small_runs import inputs_of

Command = Callable[..., tuple[int, str, str]]
WORDS = ("tune", "--model", "pocket", "--method", "random", "--rank", "4", "--epochs", "1")
FLAGS = {
    "model": "pocket", "task": "pocket-sentiment", "num-train": 16, "num-evaluation": 20, "epochs": 1, "rank": 4,
    "calibration-size": 16, "device": "cpu",
}  # fmt: skip


def pairs(kind: str, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"Tom has {i} {kind} .", "completion": f" {i} {kind}"} for i in range(count)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run whose flags stand in a file, and what the run printed."""
    folder = tmp_path_factory.mktemp("tune")
    (folder / "few.yaml").write_text(yaml.safe_dump(FLAGS | {"output": str(folder / "run")}))
    return folder / "run", printed("tune", "--config", folder / "few.yaml")


def test_tune_shows_the_score_and_seconds_that_add_up_and_writes_the_record(run: tuple[Path, str]) -> None:
    folder, out = run
    record = json.loads((folder / "result.json").read_text())
    assert f"{100 * record['accuracy']:.1f}" in out
    assert "256 trained values" in out
    assert "always the most frequent answer" in out
    seconds: dict[str, float] = {}
    for label, spent in re.findall(r"^([A-Z][a-z ]+): \d+ in ([\d.]+) s", out, flags=re.MULTILINE):
        seconds[label] = seconds.get(label, 0.0) + float(spent)
    whole, rest = map(float, re.search(r"In all: ([\d.]+) s, ([\d.]+) s of it", out).groups())  # type: ignore[union-attr]
    assert {"Start", "Load model and rows", "Hash the model", "Calibrate", "Train"} <= seconds.keys()
    assert sum(seconds.values()) + rest == pytest.approx(whole, abs=1.0)  # each is rounded
    stages = ("Calibrate", "Build the bases", "Measure the rate", "Try the rate")
    assert sum(seconds[stage] for stage in stages) <= record["calibration_s"] + 0.2  # it holds adding the adapter too


def test_a_run_writes_the_file_of_flags_that_makes_it_again(
    run: tuple[Path, str], command: Command, tmp_path: Path
) -> None:
    written = run[0] / "run.yaml"
    assert yaml.safe_load(written.read_text())["rank"] == 4
    assert command("tune", "--config", written, "--out", tmp_path)[0] == 0
    first, second = (folder / "adapter" / "adapter_model.safetensors" for folder in (run[0], tmp_path))
    assert first.read_bytes() == second.read_bytes()


def test_what_a_run_warned_of_is_shown_and_kept_in_its_record(command: Command, tmp_path: Path) -> None:
    wide = ("--task", "pocket-sentiment", "--rank", "96", "--targets", "k_proj")  # k_proj has 80 rows
    status, out, _ = command(*WORDS, *wide, "--num-train", 8, "--num-evaluation", 8, "--out", tmp_path / "run")
    assert status == 0
    (warning,) = json.loads((tmp_path / "run" / "result.json").read_text())["warnings"]
    assert "4 of 4 layers are narrower than the rank" in warning
    assert f"Warning: {warning}" in " ".join(out.split())


def test_a_dry_run_says_what_would_be_read_and_taken_and_writes_nothing(command: Command, tmp_path: Path) -> None:
    rows = [{"prompt": f"Tom has {i} cats .", "completion": " two cats"} for i in range(20)]
    write_rows(tmp_path / "rows.jsonl", rows)
    few = ("--rank", 4, "--epochs", 2, "--batch-size", 3)
    words = ["tune", *WORDS[1:3], "--data", tmp_path / "rows.jsonl", *few]
    status, out, err = command(*words, "--accumulation", "2", "--out", tmp_path / "run", "--dry-run")
    assert (status, err) == (0, "")
    assert not (tmp_path / "run").exists()
    prepared = inputs_of(make_config(model="pocket", data=tmp_path / "rows.jsonl"))
    lengths = [len(row.input_ids) for row in prepared.rows.train]
    with_loss = 18 * (1 + len(prepared.encoder.tokenizer(" two cats", add_special_tokens=False)["input_ids"]))
    assert f"18 rows to train on: {sum(lengths)} tokens, {with_loss} of them with loss; " in out
    assert f"{max(lengths)} at most (limit 512)" in out
    assert "2 rows to score: " in out
    assert "6 steps of 6 rows, 3 at a time in 2 epochs; learning rate measured on the rows" in out
    places = "q_proj, k_proj, v_proj, o_proj"
    assert f"fcca: 256 trained values in {places} (3,072 bytes of state held while training), about " in out
    by_ones = command(*words, "--out", tmp_path / "run", "--dry-run", "--calibration-batch", 1)[1]
    most, less = (re.findall(r"about .+ of memory", said) for said in (out, by_ones))
    assert most != less  # three rows train at a time, and eight are calibrated on
    uncounted = command(*words, "--out", tmp_path / "run", "--dry-run", "--method", "dora")
    assert "dora: " in uncounted[1]
    asked = out.partition("as a file for --config\n")[2].partition("\n\n")[0]
    few = {"rank": 4, "epochs": 2, "batch-size": 3, "accumulation": 2}
    assert yaml.safe_load(asked) == {"model": "pocket", "data": str(tmp_path / "rows.jsonl"), **few}
    assert re.fullmatch(r"Tom has \d+ cats \.⟦ two cats<\|endoftext\|>⟧", out.splitlines()[-1])


def test_what_is_read_held_out_left_out_cut_or_changed_is_shown_and_recorded(command: Command, tmp_path: Path) -> None:
    odd = [
        {"prompt": "Who ?", "completion": ""}, {"prompt": "Who ?", "completion": " Tom<|endoftext|>", "source": "b"},
        {"prompt": "Tom has cats . " * 9, "completion": " one"}, {"prompt": "Tom", "completion": " has" * 30},
    ]  # fmt: skip
    cats, dogs = write_rows(tmp_path / "cats.jsonl", [*pairs("cats", 20), *odd]), tmp_path / "dogs.jsonl"
    write_rows(dogs, pairs("dogs", 8))
    held = write_rows(tmp_path / "held.jsonl", [*pairs("cups", 5), *pairs("dogs", 2)])
    words = (*WORDS, "--data", cats, "--data", dogs, "--eval-data", held, "--skip-bad", "--max-length", 20)
    status, _, err = command(*words, "--out", tmp_path / "run")
    assert (status, err.count("\n"), (tmp_path / "run").exists()) == (2, 1, False)
    assert "--too-long skip" in err
    status, out, err = command(*words, "--too-long", "cut", "--out", tmp_path / "run")
    assert (status, err) == (0, "")
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    used, said = record["rows"], " ".join(out.split())
    assert (used["read"], used["trained"], used["scored"], used["held_out_from"]) == (32, 28, 7, "held.jsonl")
    assert used["left_out"] == {"column 'completion' must hold text": 1, "too long": 1, "also in --eval-data": 2}
    assert (used["cut"], used["skipped"], list(used["changed"].values())) == (1, 1, [1])
    assert (used["unused_columns"], [one["source"] for one in used["sources"]]) == (["source"], [str(cats), str(dogs)])
    for words_said in (
        "28 rows to train on, 7 to score, 1 prompt cut, 1 row skipped as too long", "1 column not used: source",
        "1 row changed: <|endoftext|>", "Held-out rows are those of held.jsonl", f"{dogs}: 8 of 8 rows",
        "Read 32 rows by prompt and completion; ",
    ):  # fmt: skip
        assert words_said in said
    assert RunRecord.model_validate_json((tmp_path / "run" / "result.json").read_text()).content() == record
    assert command("tune", "--config", tmp_path / "run" / "run.yaml", "--out", tmp_path / "again")[0] == 0
    assert json.loads((tmp_path / "again" / "result.json").read_text())["hashes"] == record["hashes"]


def test_a_run_uploads_its_adapter_to_a_private_repository(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, bytes] = {}

    def create_repo(_: HfApi, repository: str, *, private: bool, exist_ok: bool) -> str:
        assert private
        return f"https://hub/{repository}"

    def create_commit(_: HfApi, repository: str, added: list[CommitOperationAdd], *, commit_message: str) -> None:
        sent.update({f"{repository}/{one.path_in_repo}": Path(one.path_or_fileobj).read_bytes() for one in added})

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    few = ("--task", "pocket-sentiment", "--num-train", 8, "--num-evaluation", 8)
    status, out, err = command(*WORDS, *few, "--push-to-hub", "anna/mine", "--out", tmp_path / "run")
    assert status == 0, err
    assert "Uploaded: https://hub/anna/mine" in out
    adapter = tmp_path / "run" / "adapter"
    assert sent == {f"anna/mine/{file.name}": file.read_bytes() for file in adapter.iterdir()}
