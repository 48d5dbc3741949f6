"""A rehearsal from specification to screen: of sound campaigns, and of campaigns with a planted fault."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from small_task import write_task

Command = Callable[..., tuple[int, str, str]]

HEAD = """
name: faulty
models: {qwen: Qwen/Qwen2.5-3B-Instruct}
base: {batch_size: 1, accumulation: 8, warmup: 0.1, dtype: bfloat16, paper_steps: true}
studies:
"""


def rehearse(command: Command, folder: Path, studies: str, *words: str | Path) -> tuple[int, str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(HEAD + studies)
    status, out, err = command(
        "campaign", "rehearse", folder / "spec.yaml", "--output", folder / "out", "--workers", 0, *words
    )
    assert not err, err
    return status, " ".join(out.split())


SOUND = """
  comparison:
    title: Two methods with search, one without
    axes: {model: [qwen], task: [svamp, gsm8k], method: [fcca, lora, random], seed: [42, 43, 44]}
    search:
      grids:
        - {for: [fcca], warmup: [0.03, 0.1]}
        - {for: [lora], learning_rate: [1e-4, 2e-4]}
    report: {rows: [task], columns: [method], reference: fcca, figure: ranking}
  stability:
    title: Nearness of the bases
    kind: stability
    reference_size: 512
    axes: {model: [qwen], task: [svamp], calibration_size: [64, 512], seed: [42]}
    report: {columns: [calibration_size], mean: false}
"""


@pytest.mark.rehearsal
def test_a_sound_campaign_fills_every_cell_of_the_report_that_it_would_have(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no network at all: whoever asks for one fails at once."""

    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    started = time.monotonic()
    status, out = rehearse(command, tmp_path, SOUND)
    assert status == 0, out
    assert "Rehearsal of faulty: " in out
    assert "0 failed" in out
    assert "Sampled: 2 of 3 seeds; bfloat16 on svamp, float32 elsewhere." in out
    assert "Rows made up by schema: ChilleD/SVAMP, openai/gsm8k (main)." in out
    assert "model Qwen/Qwen2.5-3B-Instruct, 6.2 GB: neither a folder nor in the cache" in out
    assert "the hub, for what is missing: it cannot be reached" in out
    found = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert found["time_s"] < time.monotonic() - started
    assert [study["num_figures"] for study in found["studies"]] == [2, 1, 1, 0]
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out" / "report").rglob("*") if p.is_file()}
    assert written == set(found["files"])
    assert {"report/tables/comparison-significance.tex", "report/figures/stability.png"} <= written
    again, _ = rehearse(command, tmp_path, SOUND[SOUND.index("  stability:") :])  # in the folder of the first one
    assert again == 0


def test_a_task_without_rows_to_search_on_empties_its_cells(command: Command, tmp_path: Path) -> None:
    task = write_task(tmp_path / "mine", num_train=1, num_evaluation=3)
    studies = f"""
  search:
    title: A search with nothing to search on
    axes: {{model: [qwen], task: [{task}, svamp], method: [fcca, random], seed: [42]}}
    search: {{grids: [{{for: [fcca], warmup: [0.03, 0.1]}}]}}
    report: {{reference: fcca}}
"""
    status, out = rehearse(command, tmp_path, studies)
    assert status == 1
    assert "no trial of the search succeeded" in out
    assert "leaves no validation rows beside its 1 to train on" in out
    assert "No comparison: FCCA lacks runs." in out


def test_a_trial_that_diverges_at_once_is_found_though_its_search_goes_on(command: Command, tmp_path: Path) -> None:
    studies = """
  search:
    title: A rate that no model survives
    axes: {model: [qwen], task: [sst2], method: [lora], seed: [42]}
    search: {grids: [{learning_rate: [1e-3, 1e30]}]}
"""
    status, out = rehearse(command, tmp_path, studies)
    assert status == 1
    assert "trial: task sst2, method lora, learning_rate 1e+30: diverged: Training diverged" in out


def test_a_column_that_cannot_be_filled_and_a_reference_that_is_none_are_found(
    command: Command, tmp_path: Path
) -> None:
    studies = """
  modules:
    title: A name that matches no layer
    axes: {model: [qwen], task: [svamp, rte], targets: [[q_proj], [no_such_proj]], seed: [42]}
    report: {columns: [targets], reference: k_proj}
"""
    status, out = rehearse(command, tmp_path, studies)
    assert status == 1
    assert "'no_such_proj' matches no layer of this model" in out
    assert "k_proj" in out


def test_a_model_of_an_unknown_kind_and_a_folder_of_something_else_are_one_line(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text(HEAD.replace("Qwen/Qwen2.5-3B-Instruct", "org/unheard-of") + SOUND)
    status, _, err = command("campaign", "rehearse", tmp_path / "spec.yaml", "--output", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1)
    assert "'org/unheard-of' is not known here" in err
    assert "--model-path NAME=DIR" in err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("do not remove")
    (tmp_path / "spec.yaml").write_text(HEAD + SOUND)
    status, _, err = command("campaign", "rehearse", tmp_path / "spec.yaml", "--output", tmp_path / "full")
    assert (status, err.count("\n")) == (2, 1)
    assert "holds something that is no rehearsal" in err
    assert (tmp_path / "full" / "thesis.tex").read_text() == "do not remove"
