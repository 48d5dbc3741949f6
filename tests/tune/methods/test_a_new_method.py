"""A method from outside of the package is one row and one function: commands, campaigns and reports then know it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from peft import LNTuningConfig, PeftModel, get_peft_model
from torch import nn

from frozencore.tune.adapters import add_adapter
from frozencore.tune.figures import method_colour
from frozencore.tune.methods import METHODS, Method, MethodConfig
from small_campaign import write_spec

Command = Callable[..., tuple[int, str, str]]

CAMPAIGN = """
name: with-norms
models: {pocket: pocket}
base: {batch_size: 8, accumulation: 1, dtype: float32, num_train: 32, num_evaluation: 20, epochs: 1}
studies:
  main:
    title: A new method beside an old one
    axes: {model: [pocket], task: [pocket-sentiment], method: [random, norms], seed: [42]}
    report: {reference: random}
"""


@dataclass(frozen=True, kw_only=True)
class Norms(Method):
    """The gains of the layer norms."""


@add_adapter.register
def _(method: Norms, model: nn.Module, options: MethodConfig, bases: object = None) -> PeftModel:
    return get_peft_model(model, LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]))


@pytest.fixture
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Norms(label="Layer norms", trains=("gains",), learning_rate=3e-3, warmup=0.25)
    monkeypatch.setitem(METHODS, "norms", row)


@pytest.mark.usefixtures("_row")
def test_a_row_and_a_function_are_enough_for_a_campaign_and_its_report(command: Command, tmp_path: Path) -> None:
    spec, folder = write_spec(tmp_path, CAMPAIGN), tmp_path / "out"
    status, planned, _ = command("campaign", "plan", spec, "--out", folder)
    assert status == 0
    assert "2 different runs" in planned
    assert command("campaign", "run", spec, "--out", folder, "--workers", 0)[0] == 0
    assert command("campaign", "report", folder)[0] == 0

    lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
    (record,) = [record for record in map(json.loads, lines) if record["method"] == "norms"]
    recipe = record["resolved"]["recipe"]
    assert (recipe["learning_rate"], recipe["warmup"]) == (3e-3, 0.25)
    assert record["num_trainable"] < 4096  # fewer than the cores of rank 16
    assert "basis" not in record["hashes"]
    report = (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert "Layer norms" in report
    assert "gains" in report
    assert method_colour("norms") not in map(method_colour, METHODS.keys() - {"norms"})
