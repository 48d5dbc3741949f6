"""Campaigns small enough to run in a test, and the part of their results that no machine, interruption or order of
runs may change."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import frozencore
import frozencore_lab

SMALL = """
name: small
models: {pocket: pocket}
base:
  {batch_size: 8, accumulation: 1, dtype: float32, num_train: 32, num_evaluation: 8, epochs: 1, calibration_size: 16}
studies:
  main:
    title: Two methods with search, one without
    axes: {model: [pocket], task: [pocket-sentiment], method: [fcca, eva, milora], seed: [42, 43]}
    search:
      beyond: 0
      grids:
        - {for: [fcca], warmup: [0.03, 0.1]}
        - {for: [eva], learning_rate: [2e-3, 5e-3]}
    report: {reference: fcca}
  stability:
    title: Nearness of the bases
    kind: stability
    reference_size: 24
    axes: {model: [pocket], task: [pocket-sentiment], calibration_size: [8, 24], seed: [42]}
    report: {columns: [calibration_size]}
"""


def write_spec(folder: Path, text: str = SMALL) -> Path:
    """The specification as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return path


TWO_METHODS = """
name: small
models: {pocket: pocket}
keep_adapters: true
base:
  {batch_size: 8, accumulation: 1, dtype: float32, num_train: 16, num_evaluation: 8, epochs: 2,
   select_checkpoint: epoch}
studies:
  main:
    title: Small
    axes: {model: [pocket], task: [pocket-sentiment], method: [fcca, lora_xs], seed: [42]}
    search: {grids: [{for: [fcca], warmup: [0.03, 0.1]}]}
"""  # four runs: two of a search, and one a method
FOUR_METHODS = TWO_METHODS.replace("[fcca, lora_xs]", "[fcca, eva, milora, pissa]").replace("[42]", "[42, 43]")
NOTHING_ELSE_COUNTS = (
    "accuracy", "accuracy_before", "held_out_loss", "held_out_loss_before", "score", "hashes", "training", "selection",
    "num_trainable", "state_held_bytes", "saved_bytes", "model_bytes", "warnings", "alignment",
)  # fmt: skip
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": os.pathsep.join(str(Path(one.__file__).parents[1]) for one in (frozencore, frozencore_lab)),
}


def results_of(folder: Path) -> dict[str, Any]:
    """The results of every run by id: numbers, hashes, predictions and the bytes of its adapter, but no times."""
    found = {}
    for file in sorted(folder.glob("runs/[0-9a-f]*/result.json")):
        record = json.loads(file.read_text())
        for part in ("score", "selection"):
            record.get(part, {}).pop("time_s", None)
        final = record["config"]["evaluate_on"] == "evaluation"  # what a search trained is not kept
        weights = sorted(file.parent.glob("adapter/*.safetensors")) if final else []
        found[file.parent.name] = {
            **{name: record[name] for name in NOTHING_ELSE_COUNTS if name in record},
            "predictions": (file.parent / "predictions.jsonl").read_text(),
            "weights": [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights],
        }
    return found


def index_of(folder: Path) -> list[str]:
    """The ids in ``records.jsonl``, a line each."""
    return [json.loads(line)["run_id"] for line in (folder / "records.jsonl").read_text().splitlines()]
