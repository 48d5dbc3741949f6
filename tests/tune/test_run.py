"""A run from configuration to record, on the pocket model and a few rows."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from frozencore import FrozenCoreConfig, save_basis
from frozencore.adapter.basis import read_header
from frozencore.adapter.calibrate import calibrate
from frozencore.adapter.loaded_basis import basis_id
from frozencore.errors import (
    ArtifactError,
    ConfigError,
    DivergenceError,
    FrozenCoreError,
    TrainingError,
)
from frozencore.files.fingerprint import fingerprint_model
from frozencore.options import COMMAND_NAMES
from frozencore.progress import no_progress
from frozencore.tune.calibrate_only import execute_calibration
from frozencore.tune.config import RunConfig, make_config, run_options
from frozencore.tune.load import load_model
from frozencore.tune.methods import METHODS
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import TunedRecord, read_record
from frozencore.tune.rows.token_batches import calibration_batches
from frozencore.tune.run import execute
from frozencore.tune.scoring.score import score_rows
from frozencore_lab.tasks.registry import find_task
from small_runs import DIVERGES, bytes_in, inputs_of


def config_of(**overrides: Any) -> RunConfig:
    few = {
        "model": str(pocket_model_path()), "task": "pocket-sentiment", "rank": 4, "calibration_size": 16,
        "batch_size": 8, "accumulation": 1, "epochs": 1, "num_train": 24, "num_evaluation": 10, "device": "cpu",
    }  # fmt: skip
    return make_config(**{**few, **overrides})


def test_a_run_tells_what_it_forgets_as_the_loss_on_the_plain_text_of_other_tasks(tmp_path):
    config = config_of(forgetting=("pocket-math", "pocket-comparison"), epochs=2)
    record = execute(config, tmp_path / "run", no_progress)
    assert record.forgetting is not None
    assert list(record.forgetting) == ["pocket-math", "pocket-comparison"]
    model, tokenizer = load_model(str(pocket_model_path()), dtype="auto", device="cpu")
    trained = PeftModel.from_pretrained(load_model(str(pocket_model_path()))[0], tmp_path / "run" / "adapter")
    for task, told in record.forgetting.items():
        rows = find_task(task).draw(None).evaluation[:32]
        texts = [tokenizer(row.prompt + row.completion)["input_ids"] + [tokenizer.eos_token_id] for row in rows]
        for scored, loss in ((model, told.loss_before), (trained, told.loss)):
            with torch.no_grad():
                sums = [scored(torch.tensor([ids]), labels=torch.tensor([ids])).loss * (len(ids) - 1) for ids in texts]
            assert loss == pytest.approx(float(sum(sums)) / sum(len(ids) - 1 for ids in texts), rel=1e-4)
    rises = [told.loss - told.loss_before for told in record.forgetting.values()]
    assert record.forgotten == pytest.approx(sum(rises) / 2)
    assert record.has("forgotten")
    assert read_record((tmp_path / "run" / "result.json").read_text()) == record


def test_what_a_run_forgets_is_not_scored_while_options_are_chosen():
    assert inputs_of(config_of(forgetting=("pocket-math",), evaluate_on="validation")).rows.others == {}


def test_a_run_cannot_forget_the_task_that_it_learns():
    with pytest.raises(ConfigError, match="of other tasks, but the run learns task:pocket-sentiment"):
        config_of(forgetting=("pocket-sentiment",))


# The others' bases are built and read back in the tests of the adapter.
RUN_AT_ONCE = ("fcca", "lora", "pissa")


@pytest.mark.parametrize(
    "method", [name if name in RUN_AT_ONCE else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_every_method_runs_and_its_adapter_reloads_to_the_same_score(method: str, tmp_path: Path) -> None:
    if package := getattr(METHODS[method], "package", None):
        pytest.importorskip(package)
    unsaid = {
        name: run_options()[name].default for name in (COMMAND_NAMES.get(one, one) for one in METHODS[method].unread)
    }
    config = config_of(method=method, **unsaid)
    record = execute(config, tmp_path / "run", no_progress)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["accuracy"] == record.accuracy
    written = ["adapter", "predictions.jsonl", "result.json", "run.yaml", "training.png"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == written

    prepared = inputs_of(config)
    assert fingerprint_model(prepared.model) == record.hashes.model
    model = PeftModel.from_pretrained(prepared.model, tmp_path / "run" / "adapter")
    score = score_rows(model, prepared.encoder, prepared.rows.scored)
    assert score.task is not None
    assert score.task.accuracy == record.accuracy
    rounding = 1e-5 if METHODS[method].changes_base else 0
    assert score.held_out_loss == pytest.approx(record.held_out_loss, abs=rounding)
    lines = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert [line["prediction"] for line in lines] == [p.prediction for p in score.predictions]
    assert record.score is not None
    assert record.score.correct == "".join(str(int(line["correct"])) for line in lines)
    by_row = record.row_losses
    assert by_row is not None
    assert [f"evaluation-{number}" for number in by_row.numbers] == [line["id"] for line in lines]
    assert sum(by_row.nats) / sum(by_row.tokens) == pytest.approx(record.held_out_loss, rel=1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TunedRecord, Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    return execute(config_of(), folder, no_progress), folder


def test_the_record_holds_what_is_needed_to_trust_it(whole: tuple[TunedRecord, Path]) -> None:
    record, _ = whole
    assert record.num_trainable == 16 * 4**2
    assert record.state_held_bytes == 12 * 16 * 4**2
    assert record.config.content()["calibration_size"] == 16
    assert record.config.content()["learning_rate"] == "auto"
    assert 1e-4 < record.resolved.recipe["learning_rate"] < 1e-1  # measured on the rows
    assert record.resolved.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (record.resolved.prompt_style, record.resolved.dtype) == ("plain", "float32")
    hashed = {"model", "config", "train", "calibration", "evaluation", "choices", "basis"}
    assert hashed == record.hashes.content().keys()
    assert record.training.num_steps == len(record.training.losses) == 3
    assert record.calibration.smallest_effective_rank == 4
    assert len(record.alignment.layers.J) == record.calibration.num_layers == 16
    assert 0 < record.alignment.J_share < 1
    assert torch.__version__.startswith(record.provenance.versions["torch"].split("+")[0])
    assert record.peak_memory_bytes > 0
    assert record.calibration_s > 0
    assert record.training_s > 0


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(
    whole: tuple[TunedRecord, Path], tmp_path: Path
) -> None:
    first, folder = whole
    again, other = (execute(config_of(seed=seed), tmp_path / f"{seed}", no_progress) for seed in (first.seed, 2))
    assert first.training == again.training
    assert first.hashes == again.hashes
    weights = "adapter/adapter_model.safetensors"
    assert (folder / weights).read_bytes() == (tmp_path / f"{first.seed}" / weights).read_bytes()
    assert other.training.losses != first.training.losses
    assert other.hashes.calibration != first.hashes.calibration
    assert other.hashes.evaluation == first.hashes.evaluation


def test_a_calibration_alone_chooses_the_basis_of_the_run(whole: tuple[TunedRecord, Path], tmp_path: Path) -> None:
    """Both call one function with the same batches."""
    execute_calibration(config_of(), tmp_path / "calibration", no_progress)
    assert read_header(str(tmp_path / "calibration" / "basis")).id == whole[0].hashes.basis


def test_a_finished_run_is_never_overwritten(whole: tuple[TunedRecord, Path]) -> None:
    before = bytes_in(whole[1])
    with pytest.raises(ArtifactError, match="already holds a finished run"):
        execute(config_of(method="random"), whole[1], no_progress)
    assert bytes_in(whole[1]) == before


def stop_at(stage: str, step: int = 0) -> Callable[..., None]:
    def stop(came: str, done: int, *_: object) -> None:
        if came == stage and done >= step:
            raise KeyboardInterrupt

    return stop


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(KeyboardInterrupt):
        execute(config_of(epochs=2), folder, stop_at("train", 5))
    return folder


def test_a_run_whose_record_could_not_be_written_goes_on_from_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ArtifactError("no space")

    with monkeypatch.context() as patched, pytest.raises(ArtifactError, match="no space"):  # noqa: PT012
        patched.setattr("frozencore.tune.run.write_json", refuse)
        execute(config_of(), tmp_path / "run", no_progress)
    stages: set[str] = set()
    execute(config_of(), tmp_path / "run", lambda stage, *_: stages.add(stage), resume=True)
    assert "calibration" not in stages
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["adapter"]


def no_work(stage: str, *_: object) -> None:
    raise AssertionError(f"{stage}: the options are compared before any work")


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"method": "rawgrad"}, "--method is rawgrad, and was fcca"),
        ({"rank": 16}, "--rank is 16, and was 4"),  # the default
        ({"core": {"damping": 10.0}}, "--damping is 10.0, and was 0.001"),
        ({"targets": ("q_proj",)}, r"--targets is \['q_proj'\], and was none"),
        ({"dtype": "bfloat16"}, "--dtype is bfloat16, and was auto"),
        ({"num_train": 16}, "--num-train is 16, and was 24"),
        ({"select_checkpoint": "epoch"}, "--select-checkpoint is epoch, and was none"),
        ({"seed": 7}, "--seed is 7, and was 42"),
    ],
)
def test_a_run_is_not_resumed_with_another_option_which_is_named_before_any_work(
    changed: dict[str, Any], difference: str, interrupted: Path
) -> None:
    before = bytes_in(interrupted)
    with pytest.raises(TrainingError, match=difference) as caught:
        execute(config_of(**{"epochs": 2, **changed}), interrupted, no_work, resume=True)
    assert "\n" not in str(caught.value)
    assert bytes_in(interrupted) == before


def test_a_run_is_not_resumed_by_code_that_takes_rows_in_another_order(
    interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frozencore.tune.run.STEPS_VERSION", 0)
    with pytest.raises(TrainingError, match="the recipe changed"):
        execute(config_of(epochs=2), interrupted, no_progress, resume=True)


def test_a_run_is_not_resumed_on_another_basis_at_the_same_place(tmp_path: Path) -> None:
    for seed in (1, 2):
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(pocket_model_path()),
            FrozenCoreConfig(r=4, constructor="random", seed=seed),
        )
        save_basis(model, tmp_path / f"basis-{seed}")
    (tmp_path / "basis").symlink_to("basis-1")
    config = config_of(basis=str(tmp_path / "basis"))
    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path / "run", stop_at("train"))
    (tmp_path / "basis").unlink()
    (tmp_path / "basis").symlink_to("basis-2")
    with pytest.raises(TrainingError, match="but the basis changed"):
        execute(config, tmp_path / "run", no_progress, resume=True)


def test_a_run_is_resumed_with_files_that_have_moved_and_not_on_another_model_or_on_other_rows(tmp_path: Path) -> None:
    rows, model = tmp_path / "rows.jsonl", tmp_path / "model"
    config = config_of(task=None, data=rows, num_train=None, num_evaluation=None, model=str(model))

    def write(shift: int) -> None:
        shutil.copytree(pocket_model_path(), model, dirs_exist_ok=True)
        texts = [json.dumps({"prompt": f"Tom has {i + shift} cats .", "completion": f" {i} cats"}) for i in range(40)]
        rows.write_text("\n".join(texts) + "\n")

    write(0)
    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path / "run", stop_at("train"))
    moved = config.replaced(data=str(rows.rename(tmp_path / "moved.jsonl")))
    with pytest.raises(KeyboardInterrupt):
        execute(moved, tmp_path / "run", stop_at("train"), resume=True)
    assert "moved.jsonl" in (tmp_path / "run" / "run.yaml").read_text()
    before = bytes_in(tmp_path / "run")
    write(1)
    with pytest.raises(TrainingError, match="the train rows and the calibration rows and the evaluation rows changed"):
        execute(config, tmp_path / "run", no_progress, resume=True)
    write(0)
    other = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        other.lm_head.weight[0] += 1
    other.save_pretrained(model)
    with pytest.raises(TrainingError, match="but the base model changed"):
        execute(config, tmp_path / "run", no_progress, resume=True)
    write(0)
    other.config.rms_norm_eps = 1e-2
    other.config.save_pretrained(model)
    with pytest.raises(TrainingError, match="but the base model's configuration changed"):
        execute(config, tmp_path / "run", no_progress, resume=True)
    assert bytes_in(tmp_path / "run") == before


def test_a_run_that_is_killed_again_and_again_never_reads_a_part_of_another(
    whole: tuple[TunedRecord, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while the start is written, and a try with other damping in between."""
    out = tmp_path / "run"

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for damping in (0.001, 10.0, 0.001):
        config = config_of(core={"damping": damping})
        with monkeypatch.context() as patched:
            patched.setattr("frozencore.tune.adapt.PeftModel.save_pretrained", killed)
            error = TrainingError if damping == 10.0 else KeyboardInterrupt
            with pytest.raises(error):
                execute(config, out, no_progress, resume=out.exists())
    record = execute(config_of(core={"damping": 0.001}), out, no_progress, resume=True)
    assert record.alignment == whole[0].alignment
    assert record.hashes == whole[0].hashes
    assert record.training == whole[0].training


def test_a_run_that_ends_while_another_waits_for_its_folder_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flock = tmp_path / "run", fcntl.flock

    def end_meanwhile(folder: int, how: int) -> None:
        flock(folder, how)
        (out / "result.json").write_text("{}")

    monkeypatch.setattr("frozencore.tune.folder.fcntl.flock", end_meanwhile)
    with pytest.raises(ArtifactError, match="already holds a finished run"):
        execute(config_of(), out, no_work)
    assert (out / "result.json").read_text() == "{}"


def test_a_run_that_diverges_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"diverged at step \d+ of \d+: ") as caught:
        execute(config_of(learning_rate=DIVERGES), tmp_path / "run", no_progress)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_nan_in_the_model_stops_the_run_before_anything_is_written(tmp_path: Path) -> None:
    model, tokenizer = load_model(str(pocket_model_path()), device="cpu")
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    with pytest.raises(FrozenCoreError, match=r"[Nn]a[Nn]|not finite"):
        execute(config_of(model=str(tmp_path / "broken")), tmp_path / "run", no_progress)
    assert not (tmp_path / "run").exists()


def test_the_library_alone_gives_the_basis_of_the_run(whole: tuple[TunedRecord, Path]) -> None:
    """`tune` does the same as a user's ten lines."""
    prepared = inputs_of(config_of())
    model = get_peft_model(prepared.model, FrozenCoreConfig(r=4, seed=42, task_type="CAUSAL_LM"))
    batches = calibration_batches(prepared.rows.calibration, prepared.encoder.pad_id)
    calibrate(model, batches, progress=False)
    assert basis_id(model) == whole[0].hashes.basis
