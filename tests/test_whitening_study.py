"""benchmarks/whitening.py: the whole study at its tiniest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import forked
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.slow
def test_the_study_measures_every_unit_once(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    command = forked.script(BENCHMARKS / "whitening.py", "--quick", "--out", out)
    ended = forked.ended(command, tmp_path)
    assert ended.status == 0, ended.err[-2000:]
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    spreads = {one["unit"]: one["input_spread"] * one["error_spread"] for one in found if one["phase"] == "spread"}
    assert len(spreads) == 4
    assert all(spread > 1 for spread in spreads.values())
    finals = {(one["constructor"], one["unit"]): one for one in found if one["phase"] == "final"}
    units = {"0", "2", "smallest", "largest"}
    assert set(finals) == {(name, unit) for name in ("fcca", "rawgrad", "filora") for unit in units}
    layers = {unit: finals["fcca", unit]["layers"] for unit in units}
    assert layers["2"] == [2]
    assert max(spreads[str(one)] for one in layers["smallest"]) <= min(spreads[str(one)] for one in layers["largest"])
    for name in ("fcca", "rawgrad", "filora"):  # the best rate of a search trains the final run
        tried = {one["learning_rate"]: one["loss"] for one in found
                 if one["phase"] == "search" and (one["constructor"], one["unit"]) == (name, "largest")}  # fmt: skip
        assert finals[name, "largest"]["learning_rate"] == min(tried, key=tried.__getitem__)
    before = out.read_bytes()
    assert forked.ended(command, tmp_path).status == 0
    assert out.read_bytes() == before


def test_the_spread_is_the_largest_channel_over_the_median_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from whitening import layer_of, spread

    assert spread([torch.tensor([1.0, 2.0, 8.0]), torch.tensor([3.0, 1.0, 1.0])]) == pytest.approx(12**0.5)
    assert layer_of("model.layers.12.self_attn.q_proj.P") == 12
