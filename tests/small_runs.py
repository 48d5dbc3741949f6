"""Runs of the pocket model on a few rows, and records of runs that never were, of which every number is known."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor

from frozencore import frozen_core_layers
from frozencore.progress import no_progress
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.load import Inputs, load_model, prepare
from frozencore.tune.methods import METHODS
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import RunRecord, read_record

SIZES = {"anna": 9, "ben": 21, "cleo": 14}
DIVERGES = 1e300
"""A learning rate that no float32 holds: one step makes a core infinite, on every processor."""


def config_of(data: Path, **overrides: Any) -> RunConfig:
    """A short run, whose cores keep their 32 bits so that runs can be compared."""
    few = {
        "model": str(pocket_model_path()), "data": data, "rank": 4, "calibration_size": 16, "batch_size": 2,
        "accumulation": 2, "epochs": 2, "device": "cpu",
    }  # fmt: skip
    whole = {"bits": 32} if METHODS[overrides.get("method", "fcca")].has_bases else {}
    return make_config(**{**few, **whole, **overrides})


def inputs_of(config: RunConfig) -> Inputs:
    return prepare(config.model, config.rows, config.scoring, no_progress)


def adapter_in(folder: Path, name: str = "adapter", *, is_trainable: bool = False) -> PeftModel:
    base, _ = load_model(str(pocket_model_path()), device="cpu")
    return PeftModel.from_pretrained(base, folder / name, is_trainable=is_trainable)


def bytes_in(folder: Path) -> dict[Path, bytes]:
    """The content of each file, by its path in the folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cores_in(folder: Path) -> dict[str, Tensor]:
    layers = frozen_core_layers(adapter_in(folder), "default")
    return {name: layer.factors("default")[2].detach() for name, layer in layers.items()}


def difference(cores: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The relative error over all layers."""
    assert cores.keys() == expected.keys()
    distance = sum(float((cores[name] - R).norm() ** 2) for name, R in expected.items())
    return (distance / sum(float(R.norm() ** 2) for R in expected.values())) ** 0.5


RESOURCES = {"magnitude_parameters": 0, "saved_bytes_without_bases": 147_456, "step_s": 0.1}
SCORE = {
    "task": "svamp", "held_out_loss": 1.2, "time_s": 3.0, "chance": 0.5, "majority_class": None, "num_ties": 0,
    "num_duplicate_choices": 0, "num_cut": 0, "num_truncated": 0, "num_unanswered": 0, "num_examples": 4,
    "accuracy": 0.75, "standard_error": 0.02, "correct": "1101",
}  # fmt: skip
RECIPE = {"learning_rate": 1e-2, "warmup": 0.1, "epochs": 1, "batch_size": 8, "accumulation": 1}
RESOLVED = {
    "targets": "all-linear", "recipe": RECIPE, "max_length": 512, "prompt_style": "chat", "dtype": "bfloat16",
}  # fmt: skip
PROVENANCE = {
    "commit": "c3" * 20, "versions": {"torch": "2.13.0"}, "python": "3.11.7", "steps_version": 2, "device": "a CPU",
    "platform": "Linux", "num_threads": 1,
}  # fmt: skip
TRAINED = {"lora": 7_372_800, "dora": 7_538_688, "pissa": 7_372_800}


def record_content(axes: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The JSON of a record; its numbers depend on the axes alone. A value of ``...`` leaves its key out."""
    draw = random.Random(repr(sorted(axes.items(), key=str)))
    method = str(axes.get("method", "fcca"))
    accuracy, trained = 0.6 + 0.3 * draw.random(), TRAINED.get(method, 36_864)
    content = {
        "format": 1,
        "config": {"model": "somewhere/model", "dtype": "bfloat16", "task": axes["task"], "method": method, "rank": 16},
        "task": axes["task"],
        "method": method,
        "seed": axes.get("seed", 42),
        "accuracy": accuracy,
        "accuracy_before": 0.5,
        "score": SCORE,
        "held_out_loss": 2 - accuracy,
        "held_out_loss_before": 1.8,
        "num_trainable": trained,
        "state_held_bytes": 12 * trained,
        "saved_bytes": 29_638_656,
        "model_bytes": 6_000_000_000,
        "calibration_s": 3.5,
        "training_s": 26.2,
        "total_s": 40.0,
        "peak_memory_bytes": 700_000_000,
        "training": {"num_steps": 262, "final_loss": 1.1},
        "rows": {"trained": 2096, "scored": 500, "scored_on": "evaluation", "validation_from": ""},
        "resources": RESOURCES,
        "resolved": RESOLVED,
        "hashes": {"model": "a1" * 32, "basis": "b2" * 32},
        "provenance": PROVENANCE,
        **values,
    }
    return {key: value for key, value in content.items() if value is not ...}


def alignment_content(share: float) -> dict[str, Any]:
    """The JSON of a record's alignment, of one layer, whose bases capture this share of the gradient."""
    layers = {
        "name": ["a"], "J": [share], "energy": [1.0], "gradient": [share], "gradient_total": [1.0],
        "leading": [[share]], "last": [share / 2], "effective_rank": [4], "participation": [2.0],
        "input_spread": [3.0], "error_spread": [None],
    }  # fmt: skip
    return {
        "damping": 1e-3, "J": 100 * share, "J_share": share, "gradient": 7 * share, "gradient_share": share,
        "leading": [share], "last": share / 2, "effective_rank": 4.0, "participation": 2.0, "input_spread": 3.0,
        "error_spread": None, "layers": layers,
    }  # fmt: skip


def stability_content(axes: Mapping[str, Any], cosine: float) -> dict[str, Any]:
    """The JSON of a record that compares bases; ``cosine`` is that of P."""
    content = record_content(axes)
    return {key: content[key] for key in ("format", "config", "provenance")} | {"cosine_P": cosine, "cosine_Q": 1.0}


def made_up_record(axes: Mapping[str, Any], **values: Any) -> Any:
    """The record read from :func:`record_content`: a :class:`TunedRecord`, unless ``cosine_P`` is among the values."""
    record: RunRecord = read_record(json.dumps(record_content(axes, **values)))
    return record
