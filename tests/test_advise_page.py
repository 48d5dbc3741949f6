"""docs/advise.md gives the figures of benchmarks/results/advice.json, and of all tasks."""

from __future__ import annotations

import json

from places import ROOT

PAGE = (ROOT / "docs" / "advise.md").read_text(encoding="utf-8")
CACHE = json.loads((ROOT / "benchmarks" / "results" / "advice.json").read_text(encoding="utf-8"))


def test_the_correlations_and_the_costs_are_the_recorded_ones() -> None:
    all_tasks = CACHE["constructors"]
    assert all_tasks["points"] == 63
    said = f"within tasks {all_tasks['rho']:.2f}, 95 % interval {all_tasks['low']:.2f} to {all_tasks['high']:.2f}"
    assert said in PAGE.replace("\n", " ")
    for row in CACHE["rows"]:
        assert f"| {row['task']} | {all_tasks['tasks'][row['task']]:.2f} |" in PAGE
    for campaign, said in (("tiny1m-text", "on the texts"), ("pocket", "on the pocket tasks")):
        passes = [row["over_training_pass"] for row in CACHE["rows"] if row["campaign"] == campaign]
        assert f"{min(passes)} to {max(passes)} {said}" in PAGE
        assert max(passes) <= 4  # as it says
    smollm2 = json.loads((ROOT / "benchmarks" / "results" / "advise-smollm2.json").read_text(encoding="utf-8"))
    assert f"with {smollm2['rows']} rows of SST-2, which are short, it was {smollm2['passes']:.1f} (" in PAGE
    assert smollm2["passes"] <= 4


def test_what_became_of_the_recommendation_is_the_recorded_outcome() -> None:
    outside = []
    for row in CACHE["rows"]:
        found = row["against_the_best"]
        said = f"| {found['loss']:.4f} | {found['best']} | {found['difference']:+.4f} ± {found['standard_error']:.4f} |"
        assert f"| {row['task']} | {found['bases']} {said}" in PAGE
        if found["difference"] > 2 * found["standard_error"]:
            outside.append(f"`{row['task']}`")
    assert f"on {len(CACHE['rows']) - len(outside)} of seven; not on {' and '.join(outside)}" in PAGE
