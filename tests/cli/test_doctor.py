"""``frozencore doctor`` says what a path is and what is wrong with it, on what the commands themselves wrote."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adapted import adapted
from frozencore import export_basis_model, export_lora, export_tenant, save_basis
from frozencore.cli.doctor import Diagnosis, diagnose
from frozencore.files.whole_file import write_json
from frozencore.tune.evaluation.evaluate import Evaluation, evaluate
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run.calibrate_only import execute_calibration
from frozencore.tune.run.config import make_config
from frozencore.tune.run.execute import execute
from frozencore.tune.run.many.execute_many import execute_many
from frozencore.tune.suite import find_tasks
from places import LAB
from tiny import tiny_qwen2

MODEL = str(pocket_model_path())


def silent(stage: str, done: int, total: int | None, note: str = "") -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of everything, as the commands write it."""
    folder = tmp_path_factory.mktemp("made")
    config = make_config(
        model=MODEL, task="pocket-sentiment", rank=4, calibration_size=16, batch_size=8, accumulation=1, epochs=1,
        num_train=16, num_evaluation=10, device="cpu",
    )  # fmt: skip
    execute(config, folder / "run", silent)
    execute(config.model_copy(update={"method": "lora"}), folder / "baseline", silent)
    execute_calibration(config, folder / "calibration", silent)
    (folder / "rows").mkdir()
    for name in ("anna", "ben"):
        row = json.dumps({"prompt": f"Who is {name}?", "completion": f" {name}"}) + "\n"
        (folder / "rows" / f"{name}.jsonl").write_text(row + row.replace("is", "was") + row.replace("Who", "And who"))
    few = make_config(model=MODEL, data=folder / "rows", rank=4, device="cpu")
    execute_many(few, folder / "tenants", silent)
    execute_many(
        few.model_copy(update={"learning_rate": 1e38, "epochs": 4, "accumulation": 1}), folder / "wild", silent
    )
    model = adapted("fcca", trained=True)
    model.save_pretrained(str(folder / "adapter"))
    model.save_pretrained(str(folder / "above" / "adapter"))
    save_basis(model, folder / "cores" / "basis")
    model.save_pretrained(str(folder / "cores"))
    export_lora(folder / "adapter", folder / "lora")
    tiny_qwen2().save_pretrained(folder / "base")
    export_basis_model(folder / "adapter", folder / "basis model", base=folder / "base")
    export_tenant(folder / "adapter", folder / "tenant", basis_model=folder / "basis model")
    tasks = tuple(find_tasks("pocket-sentiment"))
    evaluate(Evaluation(MODEL, tasks, num_evaluation=10, device="cpu"), folder / "evaluation", silent)
    shutil.copytree(LAB / "results" / "scale", folder / "campaign")
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


SOUND = {
    "run": "run", "baseline": "run", "calibration": "moments", "calibration/moments.safetensors": "moments",
    "calibration/adapter": "adapter", "adapter": "adapter", "lora": "LoRA", "basis model": "basis model",
    "tenant": "LoRA", "evaluation": "evaluation",
    "campaign": "campaign", "calibration/basis": "basis", "cores": "adapter",
    "tenants": "tenants", "tenants/anna": "run", "tenants/basis": "basis", "above": "adapter",
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_what_the_commands_write_is_recognised_and_sound(name: str, made: Path) -> None:
    found = diagnose(made / name)
    assert (found.kind, [finding for finding in found.findings if not finding.sound]) == (SOUND[name], [])
    assert found.findings


def test_a_folder_of_runs_is_a_line_for_each_and_names_what_is_wrong(made: Path, tmp_path: Path) -> None:
    for name in ("run", "baseline", "calibration", "rows"):
        shutil.copytree(made / name, tmp_path / name)
    found = diagnose(tmp_path)
    lines = {finding.part: (finding.found.partition(":")[0], finding.sound) for finding in found.findings}
    assert found.kind == "runs"
    assert lines == {"baseline": ("run", True), "calibration": ("moments", True), "run": ("run", True)}
    interrupt(tmp_path / "run")
    lines = {finding.part: finding for finding in diagnose(tmp_path).findings}
    assert [name for name, finding in lines.items() if not finding.sound] == ["run"]
    assert "the run was interrupted" in lines["run"].found


def wrong(found: Diagnosis) -> str:
    return " ".join(f"{finding.part}: {finding.found}" for finding in found.findings if not finding.sound)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def leave_alone(cores: Path) -> None:
    shutil.rmtree(cores / "basis")
    edit(cores / "adapter_config.json", basis=None)


def interrupt(run: Path) -> None:
    (run / "result.json").unlink()
    (run / "checkpoints" / "checkpoint-3").mkdir(parents=True)


def change_an_answer(path: Path) -> None:
    first, *others = path.read_text().splitlines()
    row = json.loads(first)
    changed = {"correct": not row["correct"], "prediction": None if row["correct"] else row["gold"]}
    path.write_text("\n".join([json.dumps(row | changed), *others]))


def contradict_an_answer(path: Path) -> None:
    first, *others = path.read_text().splitlines()
    row = json.loads(first)
    path.write_text("\n".join([json.dumps(row | {"correct": not row["correct"]}), *others]))


DAMAGED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped adapter": ("adapter", lambda p: flip(p / "adapter_model.safetensors"), "is not the file that was saved"),
    "flipped basis": ("calibration/basis", lambda p: flip(p / "basis.safetensors"), "is damaged"),
    "edited basis": ("calibration/basis", lambda p: edit(p / "basis.json", calibrated_on="x"), "was changed since"),
    "basis without factors": ("calibration/basis", lambda p: (p / "basis.safetensors").unlink(), "has no basis.safe"),
    "calibration with a bad basis": ("calibration", lambda p: flip(p / "basis" / "basis.safetensors"), "basis: fact"),
    "cores without their basis": ("cores", leave_alone, "Get that basis folder"),
    "flipped cores": ("cores", lambda p: flip(p / "adapter_model.safetensors"), "is not the file that was saved"),
    "pickle": (
        "adapter",
        lambda p: (p / "adapter_model.safetensors").rename(p / "adapter_model.bin"),
        "never opened",
    ),
    "half a configuration": ("adapter", lambda p: (p / "adapter_config.json").write_text('{"r": '), "is damaged"),
    "flipped moments": ("calibration", lambda p: flip(p / "moments.safetensors"), "Calibrate again"),
    "moments cut short": (
        "calibration/moments.safetensors",
        lambda p: p.write_bytes(p.read_bytes()[:50]),
        "is damaged",
    ),
    "LoRA without weights": ("lora", lambda p: (p / "adapter_model.safetensors").unlink(), "has no adapter_model"),
    "LoRA that engines refuse": ("lora", lambda p: edit(p / "adapter_config.json", use_dora=True), "SGLang"),
    "tenants that diverged": ("wild", lambda p: None, "diverged: anna, ben"),
    "a bad adapter of a tenant": (
        "tenants",
        lambda p: flip(p / "ben" / "adapter" / "adapter_model.safetensors"),
        "ben: adapter: ",
    ),
    "interrupted tenants": ("tenants", lambda p: (p / "checkpoints").mkdir(), "not all have ended"),
    "interrupted run": ("run", interrupt, "result.json: missing: the run was interrupted; run it again"),
    "damaged record": ("run", lambda p: (p / "result.json").write_text("{"), "damaged"),
    "changed answer": ("run", lambda p: change_an_answer(p / "predictions.jsonl"), "by the predictions"),
    "contradicted answer": ("run", lambda p: contradict_an_answer(p / "predictions.jsonl"), "not what it predicts"),
    "run with a bad adapter": ("run", lambda p: flip(p / "adapter" / "adapter_model.safetensors"), "adapter: weights"),
    "baseline cut short": (
        "baseline",
        lambda p: (p / "adapter" / "adapter_model.safetensors").write_bytes(b"x"),
        "is damaged",
    ),
    "changed score": (
        "evaluation",
        lambda p: change_an_answer(p / "base" / "pocket-sentiment" / "predictions.jsonl"),
        "base/pocket-sentiment: .* by the predictions",
    ),
    "damaged score": (
        "evaluation",
        lambda p: (p / "base" / "pocket-sentiment" / "result.json").write_text("[]"),
        "base/pocket-sentiment: result.json is missing or damaged: evaluate again",
    ),
    "task without a score": (
        "evaluation",
        lambda p: edit(p / "result.json", failed={"sst2": "no data"}),
        "not scored: sst2. Its `failed` says why",
    ),
    "unfinished evaluation": ("evaluation", lambda p: (p / "result.json").unlink(), "finished tasks are kept"),
    "campaign without its runs": ("campaign", lambda p: (p / "records.jsonl").unlink(), "open runs"),
    "campaign of garbage": ("campaign", lambda p: (p / "campaign.json").write_text("{]"), "campaign.json"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_wrong_is_found_and_said(case: str, copied: Path) -> None:
    name, damage, message = DAMAGED[case]
    damage(copied / name)
    found = diagnose(copied / name)
    assert found.kind is not None
    assert re.search(message, wrong(found)), found


def test_an_untrained_uncalibrated_adapter_is_wrong(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="never calibrated"):
        adapted("fcca", calibrated=False).save_pretrained(str(tmp_path))
    assert "never calibrated" in wrong(diagnose(tmp_path))


def test_what_is_not_ours_is_said_to_be_none(tmp_path: Path, made: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "other.safetensors", tmp_path / "nowhere", Path(MODEL)):
        assert diagnose(path).kind is None


def test_the_exit_status_is_for_scripts(command: Any, copied: Path, tmp_path: Path) -> None:
    status, out, _ = command("doctor", copied / "adapter")
    assert status == 0
    assert "hashes agree" in out
    flip(copied / "adapter" / "adapter_model.safetensors")
    status, out, _ = command("doctor", copied / "adapter")
    assert status == 1
    assert "wrong" in out
    assert "SHA-256" in out
    status, out, _ = command("doctor", tmp_path / "nowhere")
    assert status == 2
    assert "does not exist" in out


def test_nothing_is_changed(made: Path) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    for name in SOUND:
        diagnose(made / name)
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_a_run_on_ones_own_rows_has_no_predictions_and_its_adapter_may_be_elsewhere(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Tom has {i} cats ."}) + "\n" for i in range(9)))
    config = make_config(model=MODEL, data=rows, method="random", rank=2, batch_size=8, accumulation=1, device="cpu")
    execute(config, tmp_path / "run", silent)
    whole = diagnose(tmp_path / "run")
    assert (whole.kind, whole.healthy) == ("run", True)
    assert "predictions.jsonl" not in {finding.part for finding in whole.findings}
    shutil.rmtree(tmp_path / "run" / "adapter")
    (left,) = diagnose(tmp_path / "run").findings
    assert (left.sound, left.found) == (True, f"random on {rows}")


def test_averages_of_the_harness_are_not_counted_again_from_its_rows(copied: Path) -> None:
    score = copied / "evaluation" / "base" / "pocket-sentiment" / "result.json"
    edit(score, accuracy=0.123)
    assert "0.123 recorded" in wrong(diagnose(copied / "evaluation"))
    edit(score, metric="acc_norm,none")
    assert wrong(diagnose(copied / "evaluation")) == ""


def test_of_a_campaigns_runs_those_without_a_record_and_those_that_failed_are_named(copied: Path) -> None:
    campaign = copied / "campaign"
    lines = (campaign / "records.jsonl").read_text().splitlines(keepends=True)
    lines.sort(key=lambda line: '"evaluate_on": "evaluation"' not in line)  # no search waits for a final run
    failed, whole, lost = (json.loads(line)["run_id"] for line in lines[:3])
    for run_id in (whole, lost):
        (campaign / "runs" / run_id).mkdir(parents=True)
    (campaign / "runs" / whole / "result.json").write_text(lines[1])
    (campaign / "records.jsonl").write_text("".join(line for line in lines if failed not in line))
    write_json(campaign / "failed" / failed / "failure.json", {"reason": "out of memory", "message": "too large"})
    unsound = {finding.part: finding.found for finding in diagnose(campaign).findings if not finding.sound}
    assert set(unsound) == {"failed runs", lost}
    assert unsound["failed runs"].startswith("1 (out of memory): see ")
    assert unsound[lost].startswith("result.json is missing or damaged")
