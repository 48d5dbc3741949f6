"""docs/maths.md names functions and tests: each of them exists."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from statistics import mean, stdev
from typing import Any

import pytest

from places import LAB, ROOT

PAGE = (ROOT / "docs" / "maths.md").read_text(encoding="utf-8")
FUNCTIONS = sorted(set(re.findall(r"`(frozencore(?:\.\w+)+)`", PAGE)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]*test_\w+\.py(?:::\w+)?)`", PAGE)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_said_to_compute_an_equation_is_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", TESTS)
def test_what_is_said_to_prove_it_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {function}\(" if function else r"^def test_", text, flags=re.MULTILINE)


def test_every_constructor_of_the_table_is_on_the_page() -> None:
    from frozencore.constructors import CONSTRUCTORS

    assert all(f"frozencore.constructors.{name}.{name}_basis" in FUNCTIONS for name in CONSTRUCTORS)


def test_every_line_of_algorithm_one_but_its_loop_heads_and_ends_has_a_row() -> None:
    rows = re.findall(r"^\| (\d+)(?:-(\d+))? \|", PAGE, flags=re.MULTILINE)
    lines = {line for first, last in rows for line in range(int(first), int(last or first) + 1)}
    assert lines == {*range(1, 9), *range(12, 17), 18}


ROWS = {
    "held-out loss: examples weigh equally": ("example_mean", "empirical"),
    "held-out loss: tokens weigh equally": ("token_sum", "empirical"),
    "held-out loss: drawn labels": ("example_mean", "mc"),
}


@pytest.fixture(scope="module")
def losses() -> Callable[[str, tuple[str, str]], Mapping[int, float]]:
    """The committed campaign's held-out losses of a task under a weighting and labels, by seed."""
    lines = (LAB / "results" / "calibration-labels" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def found(task: str, options: tuple[str, str]) -> dict[int, float]:
        mine = [record for record in records if record["task"] == task]
        chosen = {record["seed"]: record for record in mine if options == _options(record)}
        return {seed: chosen[seed]["held_out_loss"] for seed in sorted(chosen)}

    return found


def _options(record: Mapping[str, Any]) -> tuple[str, str]:
    calibration = record["config"]["calibration"]
    return calibration["weighting"], calibration["fisher_labels"]


def _cells(heading: str) -> list[str]:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {heading} |"))
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


MEASURED_ON = ("pocket-math", "sst2-text", "gsm8k-text")


@pytest.mark.parametrize("heading", ROWS)
def test_losses_of_weightings_and_labels_are_those_of_the_records(heading: str, losses: Any) -> None:
    for task, cell in zip(MEASURED_ON, _cells(heading), strict=True):
        found = losses(task, ROWS[heading]).values()
        assert cell == f"{mean(found):.4f} ± {stdev(found):.4f}"
