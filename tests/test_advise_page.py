"""docs/advise.md gives the figures of benchmarks/results/advice.json, and of all tasks."""

from __future__ import annotations

import json

from places import ROOT

PAGE = (ROOT / "docs" / "advise.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "benchmarks" / "results" / "advice.json").read_text(encoding="utf-8"))


def test_the_correlations_and_the_costs_are_the_recorded_ones() -> None:
    all_tasks = FOUND["constructors"]
    assert all_tasks["points"] == 63
    said = f"within tasks {all_tasks['rho']:.2f}, 95 % interval {all_tasks['low']:.2f} to {all_tasks['high']:.2f}"
    assert said in PAGE.replace("\n", " ")
    for row in FOUND["rows"]:
        assert f"| {row['task']} | {all_tasks['tasks'][row['task']]:.2f} |" in PAGE
    on_text = [row["over_training_pass"] for row in FOUND["rows"] if row["campaign"] == "tiny1m-text"]
    assert f"{min(on_text)} to {max(on_text)} on the texts" in PAGE
