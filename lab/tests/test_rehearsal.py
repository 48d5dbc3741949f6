"""A rehearsal from specification to screen: of sound campaigns, and of campaigns with a planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store

Command = Callable[..., tuple[int, str, str]]

HEAD = """
name: faulty
models: {qwen: Qwen/Qwen2.5-3B-Instruct}
base: {batch_size: 1, accumulation: 8, warmup: 0.1, dtype: bfloat16, paper_steps: true}
studies:
"""
SOUND = """
  comparison:
    title: Two methods with search, one without
    axes: {model: [qwen], task: [pocket-sentiment, pocket-math], method: [fcca, lora, random], seed: [42, 43, 44]}
    search:
      grids:
        - {for: [fcca], warmup: [0.03, 0.1]}
        - {for: [lora], learning_rate: [1e-4, 2e-4]}
    report: {rows: [task], columns: [method], reference: fcca, figure: ranking}
  stability:
    title: Nearness of the bases
    kind: stability
    reference_size: 512
    axes: {model: [qwen], task: [pocket-math], calibration_size: [64, 512], seed: [42]}
    report: {columns: [calibration_size], mean: false}
"""


def rehearse(command: Command, folder: Path, studies: str, *words: str | Path) -> tuple[int, str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(HEAD + studies)
    own = ("--output", folder / "out", "--workers", 0)
    status, out, err = command("campaign", "rehearse", folder / "spec.yaml", *own, *words)
    assert not err, err
    return status, " ".join(out.split())


@pytest.mark.slow  # `make rehearse` is a part of the project's checks
def test_a_sound_campaign_fills_every_cell_of_the_report_that_it_would_have(command: Command, tmp_path: Path) -> None:
    status, out = rehearse(command, tmp_path, SOUND)
    assert status == 0, out
    found = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert (found["campaign"], found["num_failed"]) == ("faulty", 0)
    assert all(study["filled"] and not study["lacks"] for study in found["studies"])
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out" / "report").rglob("*") if p.is_file()}
    assert written == set(found["files"])
    assert {"report/tables/comparison-significance.tex", "report/figures/comparison.png"} <= written
    made = {path.name for path in (tmp_path / "out" / "runs").iterdir()}
    campaign = read_campaign(tmp_path / "spec.yaml")
    assert made & {run.job.id for run in plan(campaign, lambda _: None) if run.job} == {
        run.job.id for run in plan(campaign, lambda _: None) if run.job and run.job.config.rows.seed != 44
    }


def test_an_earlier_rehearsal_stays_if_the_specification_is_wrong_or_somebody_makes_it(
    command: Command, tmp_path: Path
) -> None:
    (out := tmp_path / "out").mkdir()
    (out / "rehearsal.json").write_text("{}")
    (out / "report").mkdir()
    axes = "axes: {model: [qwen], task: [pocket-math], method: [METHOD], seed: [42]}"
    for method, said in (("rndom", "no method 'rndom'"), ("random", "Another process drives")):
        (tmp_path / "spec.yaml").write_text(f"{HEAD}  s: {{title: S, {axes.replace('METHOD', method)}}}\n")
        with Store(out).locked("driver"):
            status, _, err = command("campaign", "rehearse", tmp_path / "spec.yaml", "--out", out, "--workers", 0)
        assert (status, err.count("\n")) == (2, 1)
        assert said in err
        assert (out / "report").is_dir()


FAULTS = {
    "a rate that no model survives": (
        "axes: {model: [qwen], task: [pocket-math], method: [lora], seed: [42]}, "
        "search: {grids: [{learning_rate: [1e-3, 1e300]}]}",
        "trial: task pocket-math, method lora, learning_rate 1e+300: diverged: Training diverged",
    ),
    "a name that matches no layer": (
        "axes: {model: [qwen], task: [pocket-math], targets: [[q_proj], [no_such_proj]], seed: [42]}, "
        "report: {columns: [targets]}",
        "'no_such_proj' matches no layer of this model",
    ),
    "a task whose rows are not here": (
        "axes: {model: [qwen], task: [svamp], method: [random], seed: [42]}",
        "ChilleD/SVAMP",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_named_with_the_cell_that_it_empties(case: str, command: Command, tmp_path: Path) -> None:
    study, said = FAULTS[case]
    (tmp_path / "no-data").mkdir()
    status, out = rehearse(command, tmp_path, f"  s: {{title: S, {study}}}\n", "--data-root", tmp_path / "no-data")
    assert status == 1
    assert said in out
