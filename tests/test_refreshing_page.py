"""The claims of docs/refreshing.md against the records of the campaigns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytest

from frozencore.tune.run.costs import training_state_bytes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "refreshing.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## What refreshing is for") : PAGE.index("## What is saved")]
TABLE = SECTION[SECTION.index("<!-- compared:begin -->") : SECTION.index("<!-- compared:end -->")]
TEXTS = ("hellaswag-text", "gsm8k-text", "sst2-text")
KINDS = {
    "one, 16384": ("fcca", 1, 16384), "rounds, 1024": ("fcca", 16, 1024), "lora, 1": ("lora", 1, 1),
    "lora, 2": ("lora", 1, 2), "one, 65536": ("fcca", 1, 65536), "rounds, 4096": ("fcca", 16, 4096),
    "lora, 7": ("lora", 1, 7), "one, 1024": ("fcca", 1, 1024),
}  # fmt: skip


def records(campaign: str) -> list[dict[str, Any]]:
    lines = (ROOT / "lab" / "results" / campaign / "records.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["config"]["evaluate_on"] == "evaluation"]


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """By kind and text."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records("frontier"):
        config = record["config"]
        of_record = record["method"], config.get("refresh", 1), config.get("rank_budget") or config.get("rank")
        if config.get("targets") == "all-linear":
            for name, kind in KINDS.items():
                if kind == of_record:
                    found.setdefault((name, record["task"]), []).append(record)
    assert {len(own) for own in found.values()} == {3}
    return found


def loss(runs: dict[tuple[str, str], list[dict[str, Any]]], kind: str, text: str) -> float:
    return mean(record["held_out_loss"] for record in runs[kind, text])


def test_its_table_is_that_of_the_committed_runs(runs: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines()[3:] if line]
    for row, kind in zip(shown, KINDS, strict=True):
        own = runs[kind, TEXTS[0]]
        counts = [f"{median(record[key] for record in own):,}" for key in ("values_at_once", "values_in_all")]
        held, saved = (median(record[key] for record in own) for key in ("state_held_bytes", "saved_bytes"))
        sizes = [f"{held / 1000:,.0f} KB", f"{saved / 1000:,.0f} KB"]
        losses = [[record["held_out_loss"] for record in runs[kind, text]] for text in TEXTS]
        assert row[1:] == [*counts, *sizes, *(f"{mean(one):.3f} ± {stdev(one):.3f}" for one in losses)]


@pytest.mark.parametrize(
    ("said", "ahead", "behind"),
    [
        ("are ahead of one basis of 16,378 by 0.021 to 0.037", "rounds, 1024", "one, 16384"),
        ("behind LoRA of rank 2 by 0.004 to 0.053", "lora, 2", "rounds, 1024"),
        ("*behind* one basis of 65,510 by 0.026 to 0.043", "one, 65536", "rounds, 4096"),
        ("behind LoRA of rank 7 (5 % more values) by 0.058 to 0.115", "lora, 7", "rounds, 4096"),
    ],
)
def test_its_differences_are_those_of_the_means(
    said: str, ahead: str, behind: str, runs: dict[tuple[str, str], list[dict[str, Any]]]
) -> None:
    assert said in SECTION
    found = sorted(loss(runs, behind, text) - loss(runs, ahead, text) for text in TEXTS)
    assert re.findall(r"0\.\d+", said) == [f"{found[0]:.3f}", f"{found[-1]:.3f}"]


def test_its_further_numbers_are_recorded(runs: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    few, lora = runs["rounds, 1024", TEXTS[0]][0], runs["lora, 2", TEXTS[0]][0]
    fewer = 1 - median(r["values_in_all"] for r in runs["rounds, 1024", TEXTS[0]]) / lora["values_in_all"]
    more = runs["lora, 7", TEXTS[0]][0]["values_in_all"] / runs["rounds, 4096", TEXTS[0]][0]["values_in_all"] - 1
    assert f"with {100 * fewer:.0f} % fewer values" in SECTION
    assert f"({100 * more:.0f} % more values)" in SECTION
    peers = [r for r in records("frontier-peers") if (r["method"], r["config"]["rank"]) == ("apollo", 4)]
    held = mean(r["state_held_bytes"] for r in peers) / 1e6
    assert f"holds {held:.1f} MB and ends at {mean(r['held_out_loss'] for r in peers):.3f}" in SECTION
    weights = training_state_bytes(peers[0]["values_in_all"]) / 1e6
    assert f"are {weights:.1f} MB, and APOLLO" in SECTION
    assert f"are {few['state_held_bytes'] / 1e6:.0f} MB in 16 rounds of 1,020 values" in SECTION
    assert f"beside {lora['state_held_bytes'] / 1e6:.1f} MB of LoRA of rank 2" in SECTION
    saved, model = few["saved_bytes"] / 1e6, few["model_bytes"] / 1e6
    assert f"{saved:.1f} MB, more than the model itself ({model:.1f} MB)" in SECTION
    assert f"one\nmodel of {model / 4:.1f} million weights" in SECTION
    one, in_rounds = (loss(runs, kind, TEXTS[0]) for kind in ("one, 1024", "rounds, 1024"))
    assert f"ends at {in_rounds:.3f} where one basis with as many ends at {one:.3f}" in SECTION


def test_its_time_is_the_benchmarks() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "refreshing.json").read_text())["rows"]
    (row,) = (row for row in rows if (row["model"], row["targets"]) == ("tiny", "all-linear"))
    assert f"takes {row['summed']:.2f} times a plain one" in SECTION
