"""docs/rl.md gives the figures of benchmarks/results/rl.json."""

from __future__ import annotations

import json
from statistics import mean, stdev

from places import ROOT

STUDENT_4 = 2.776  # of five seeds, 95 %


def percent(values: list[float]) -> str:
    shares = [100 * value for value in values]
    return f"{mean(shares):.1f} ± {STUDENT_4 * stdev(shares) / 5**0.5:.1f}"


def test_every_contestants_rewards_are_the_recorded_ones() -> None:
    page = (ROOT / "docs" / "rl.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks" / "results" / "rl.json").read_text(encoding="utf-8"))
    names = {run["contestant"] for run in found["runs"]}
    assert len(names) == 6
    for name in names:
        own = [run for run in found["runs"] if run["contestant"] == name]
        assert [run["seed"] for run in own] == [0, 1, 2, 3, 4]
        sampled, likeliest = (percent([run["held_out"][kind] for run in own]) for kind in ("sampled", "likeliest"))
        assert f"| {name} | {own[0]['values']:,} | {own[0]['rate']:g} | {sampled} | {likeliest} |" in page
    start = found["start"]["held_out"]
    assert (
        f"{100 * start['sampled']:.1f} of sampled answers and {100 * start['likeliest']:.1f} of the likeliest" in page
    )
