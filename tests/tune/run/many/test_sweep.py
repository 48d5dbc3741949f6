"""A sweep against the same runs made one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from frozencore.cli.flags import read_choices
from frozencore.errors import ConfigError, DivergenceError, NoRowsError
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run.config import SWEPT, RunConfig, make_config
from frozencore.tune.run.execute import execute
from frozencore.tune.run.many.sweep import execute_sweep
from frozencore.tune.run.record import Sweep, TunedRecord, read_record
from small_task import write_task

RATES, SEEDS = (1e-3, 2e-2), (42, 7)


def config_of(**overrides: Any) -> RunConfig:
    few = {
        "model": str(pocket_model_path()), "task": "pocket-sentiment", "rank": 4, "calibration_size": 16,
        "batch_size": 8, "accumulation": 1, "epochs": 2, "num_train": 16, "num_evaluation": 10, "device": "cpu",
        "select_by": "held_out_loss",
    }  # fmt: skip
    return make_config(**{**few, **overrides})


def silent(stage: str, done: int, total: int | None, note: str = "", /) -> None:
    pass


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TunedRecord, Sweep]:
    out = tmp_path_factory.mktemp("sweep") / "out"
    config, choices = config_of(select_checkpoint=2), {"learning_rate": RATES, "seed": SEEDS}
    return out, *execute_sweep(config, choices, out, silent)


def test_each_run_of_a_sweep_is_worth_what_it_is_alone(swept: tuple[Path, TunedRecord, Sweep], tmp_path: Path) -> None:
    """The seed of the basis is the first; so that is the one that can be repeated alone."""
    _, _, sweep = swept
    assert [run.options for run in sweep.runs] == [{"learning_rate": r, "seed": s} for r in RATES for s in SEEDS]
    for number, rate in ((0, RATES[0]), (2, RATES[1])):
        alone = execute(config_of(select_checkpoint=2, learning_rate=rate), tmp_path / str(number), silent)
        run = sweep.runs[number]
        assert run.kept_step == alone.selection.kept_step
        loss = next(s.held_out_loss for s in alone.selection.scores if s.step == alone.selection.kept_step)
        assert run.held_out_loss == pytest.approx(loss, rel=1e-5)
    assert len({run.held_out_loss for run in sweep.runs}) == 4


def test_the_best_on_validation_rows_is_written_as_a_run(
    swept: tuple[Path, TunedRecord, Sweep], tmp_path: Path
) -> None:
    out, record, sweep = swept
    assert sweep.best == min(range(4), key=lambda number: sweep.runs[number].held_out_loss)
    options = sweep.runs[sweep.best].options
    assert record.resolved.recipe["learning_rate"] == options["learning_rate"]
    assert record.seed == record.resolved.recipe["seed"] == options["seed"]
    assert sorted(path.name for path in out.iterdir()) == ["adapter", "predictions.jsonl", "result.json", "sweep.json"]
    assert read_record((out / "result.json").read_text()) == record
    written = (out / "sweep.json").read_text()
    assert Sweep.model_validate_json(written) == sweep
    assert {type(run["options"]["seed"]) for run in json.loads(written)["runs"]} == {int}
    if options["seed"] == 42:
        alone = execute(config_of(select_checkpoint=2, **options), tmp_path / "alone", silent)
        assert alone.held_out_loss == pytest.approx(record.held_out_loss, rel=1e-5)
        cores = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (out, tmp_path / "alone")]
        assert all(torch.allclose(cores[0][name], X, rtol=1e-3, atol=1e-5) for name, X in cores[1].items())


def test_a_rate_that_diverges_is_no_best_and_one_that_all_share_is_divergence(tmp_path: Path) -> None:
    config = config_of(method="random")
    record, sweep = execute_sweep(config, {"learning_rate": (1e38, 5e-3)}, tmp_path / "one", silent)
    assert sweep.best == 1
    assert "diverged at step" in sweep.runs[0].diverged
    assert record.selection is None
    assert sweep.runs[1].kept_step == record.training.num_steps
    with pytest.raises(DivergenceError, match="diverged"):
        execute_sweep(config, {"learning_rate": (1e38,)}, tmp_path / "all", silent)


def test_what_cannot_be_swept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'lora' has no cores"):
        execute_sweep(config_of(method="lora"), {"seed": (1,)}, tmp_path, silent)
    for options in (
        {"padding_free": True},
        {"report_to": ("tensorboard",)},
    ):
        flag = "--" + next(iter(options)).replace("_", "-")
        with pytest.raises(ConfigError, match=f"^{flag} is for a run that trains alone, but the runs of a sweep"):
            execute_sweep(config_of(**options), {"seed": (1,)}, tmp_path, silent)
    on_all_rows = config_of(task=write_task(tmp_path, num_train=20), num_train=None, paper_steps=True)
    with pytest.raises(NoRowsError, match="validation rows"):
        execute_sweep(on_all_rows, {"seed": (1,)}, tmp_path, silent)
    assert read_choices(["lr=1e-3, 3e-3,1e-3", "batch-size=2"], SWEPT) == {
        "learning_rate": (1e-3, 3e-3), "batch_size": (2,),
    }  # fmt: skip
    for words in (["rank=4"], ["lr"], ["lr="], ["lr=1", "learning-rate=2"]):
        with pytest.raises(ConfigError, match="A sweep is one of"):
            read_choices(words, SWEPT)
    for words in (["lr=fast"], ["seed=-1"], ["epochs=0.5"]):
        with pytest.raises(ConfigError, match="must be"):
            read_choices(words, SWEPT)


def test_the_command_shows_every_run_and_the_best(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    few = (
        "--model",
        "pocket",
        "--task",
        "pocket-sentiment",
        "--rank",
        "4",
        "--calibration-size",
        "16",
        "--num-train",
        "32",
    )
    rest = ("--num-evaluation", "8", "--batch-size", "8", "--accumulation", "1", "--epochs", "1", "--device", "cpu")
    status, out, _ = command("tune", *few, *rest, "--sweep", "lr=1e-3,2e-2", "--output", tmp_path / "out")
    assert status == 0
    written = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert all(f"{run['held_out_loss']:.4f}" in out for run in written["runs"])
    assert "best" in out
