"""A private run from configuration to record: what is refused, and what its record does not tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import ConfigError
from frozencore.files.fingerprint import fingerprint_options
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run.calibrate_only import execute_calibration
from frozencore.tune.run.config import RunConfig, make_config
from frozencore.tune.run.execute import execute
from frozencore.tune.run.prepare import prepare
from frozencore.tune.run.training_port import recipe_of


def silent(stage: str, done: int, total: int | None, note: str = "") -> None:
    pass


def config_of(**overrides: Any) -> RunConfig:
    few = {
        "model": str(pocket_model_path()), "task": "pocket-sentiment", "rank": 4, "method": "random", "warmup": 0.0,
        "batch_size": 4, "accumulation": 2, "epochs": 2, "num_train": 24, "num_evaluation": 10, "device": "cpu",
        "private_epsilon": 8.0, "private_delta": 1e-3,
    }  # fmt: skip
    return make_config(**{**few, **overrides})


def own_rows(folder: Path) -> Path:
    rows = [{"prompt": f"What is {i} and {i}?", "completion": f" secret-{i:03d}"} for i in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def text_in(folder: Path) -> str:
    """All files of a folder as text, byte by byte."""
    return "".join(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file())


def test_the_record_tells_what_was_spent_and_nothing_exact_of_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    config = config_of(task=None, data=str(own_rows(tmp_path)), samples=3, exact_match="yes")
    notes: list[str] = []
    record = execute(config, tmp_path / "run", lambda stage, done, total, note="": notes.append(note))
    own = record.private
    assert own is not None
    assert (own.epsilon, own.delta, own.clip, own.num_rows, own.rows_a_step, own.num_steps) == (8, 1e-3, 1, 20, 8, 6)
    assert 7.5 < own.spent <= 8
    assert any("epsilon" in note for note in notes)
    prepared = prepare(config, silent)
    written = text_in(tmp_path / "run")
    assert "epsilon" in written
    assert "secret-" not in written
    trained = fingerprint_options({"rows": [vars(row) for row in prepared.rows.train]})
    assert trained == prepared.rows.fingerprints["train"]
    assert trained not in written
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert told["training"] == {"num_steps": 6}
    assert set(told["hashes"]) == {"model", "evaluation", "basis"}
    assert told["private"]["spent"] == own.spent
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_files_that_the_command_writes_tell_no_text_of_a_row(tmp_path: Path, command) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("opacus")
    rows, run = own_rows(tmp_path), tmp_path / "run"
    status, _, err = command(
        "tune", "--model", str(pocket_model_path()), "--data", str(rows), "--output", str(run),
        "--method", "random", "--rank", "4", "--epochs", "1", "--batch-size", "4", "--samples", "3",
        "--private-epsilon", "8", "--private-delta", "1e-3",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert {"README.md", "result.json"} <= {path.name for path in run.rglob("*")}
    assert "secret-" not in text_in(run)


def test_a_basis_of_public_rows_trains_privately(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    public = config_of(
        method="fcca", task="pocket-entailment", calibration_size=16, private_epsilon=None, private_delta=None
    )
    execute_calibration(public, tmp_path / "public", silent)
    record = execute(config_of(method="fcca", basis=str(tmp_path / "public" / "basis")), tmp_path / "run", silent)
    assert record.private is not None
    assert record.calibration is None
    assert record.basis_fit is None
    assert record.hashes.calibration is None


def test_bases_of_another_tasks_rows_are_public_and_the_card_names_that_task(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    other = {"method": "fcca", "calibration_task": "pocket-entailment", "calibration_size": 16}
    record = execute(config_of(**other), tmp_path, silent)
    assert record.hashes.calibration is not None
    assert record.hashes.train is None
    assert "16 rows of pocket-entailment" in (tmp_path / "adapter" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fcca"}, "calibrates its bases on the private rows"),
        ({"method": "lora"}, "Private training is for cores"),
        ({"rank_budget": 500, "rank": 16}, "--rank-budget chooses ranks"),
        ({"select_checkpoint": "epoch"}, "--select-checkpoint chooses a step"),
        ({"report_to": ("tensorboard",)}, "--report-to reports losses"),
        ({"private_delta": None}, "--private-epsilon came without both"),
        ({"private_epsilon": None}, "--private-delta came without both"),
        ({"private_epsilon": None, "private_delta": None, "private_clip": 1.0}, "--private-clip came without both"),
        ({"private_epsilon": 1e9}, "epsilon of private training lies between"),
    ],
)
def test_what_leaks_or_is_half_said_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        config_of(**options)
    assert "\n" not in str(raised.value)


def test_packed_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="splits a text over several rows"):
        config_of(task=None, data=str(own_rows(tmp_path)), packing=True)


def test_the_batch_size_that_is_chosen_does_not_tell_how_long_rows_are(tmp_path: Path) -> None:
    config = config_of(batch_size="auto", accumulation=16)
    prepared = prepare(config, silent)
    found = recipe_of(config, prepared.rows, prepared.model)
    longer = prepared.rows.train[0]
    longer.input_ids.extend([1] * 400)
    assert recipe_of(config, prepared.rows, prepared.model) == found
    assert found.pass_tokens is None
