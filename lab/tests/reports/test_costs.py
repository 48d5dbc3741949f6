"""Costs against the paper's tables "efficiency-runtime", "phase-profile" and "projected-time"."""

from __future__ import annotations

import math

import pytest

from frozencore_lab.reports.costs import Phases, state_sheet, study_costs, time_sheet
from small_runs import RESOURCES, alignment_content, record_content

PAPER = {  # initialisation s, step s, peak GB, trained values
    "fcca": (35, 0.81, 6.92, 36_864),
    "lora": (0, 0.92, 7.19, 7_372_800),
    "dora": (0, 1.31, 7.27, 7_538_688),
    "pissa": (41, 1.76, 7.20, 7_372_800),
}
PROFILE = """
  profile:
    title: Phase profile
    kind: profile
    axes: {model: [small], task: [svamp], method: [fcca, lora, dora, pissa], seed: [42]}
    report: {rows: [task], columns: [method], reference: fcca}
"""


@pytest.fixture
def paper(study):
    def record(axes):
        initialisation, step, peak, trained = PAPER[axes["method"]]
        magnitudes = 165_888 if axes["method"] == "dora" else 0
        resources = {**RESOURCES, "step_s": step, "magnitude_parameters": magnitudes}
        whole = {"calibration_s": initialisation, "peak_memory_bytes": round(peak * 1e9)}
        saved = 4 * 7_372_800 + 4 * 36_864
        return record_content(axes, num_trainable=trained, saved_bytes=saved, resources=resources, **whole)

    return study(PROFILE, record)


@pytest.mark.parametrize(
    ("own", "other", "ahead"),
    [
        ((35, 0.81), (0, 1.31), (70, math.inf)),  # the paper's
        ((35, 0.81), (0, 0.92), (318, math.inf)),  # the paper's
        ((35, 0.81), (41, 1.76), (0, math.inf)),  # always
        ((35, 0.81), (0, 0.5), (math.inf, math.inf)),  # never
        ((35, 0.81), (35, 0.81), (math.inf, math.inf)),
        ((0, 1.0), (50, 0.5), (0, 100)),  # up to 100 steps
    ],
)
def test_break_even_is_at_the_papers_steps_or_always_or_never(own, other, ahead):
    assert Phases(*own, 262).ahead(Phases(*other, 262)) == (pytest.approx(ahead[0], abs=0.5), ahead[1])
    assert Phases(own[0], None, 262).ahead(Phases(*other, 262)) is None


def test_the_papers_profile_projects_to_the_papers_totals(paper):
    (costs,) = study_costs(paper)
    sheet = time_sheet(costs, "profile", alone=True)
    shown = {line[0].text: [cell.text for cell in line[1:]] for line in sheet.rows}
    assert shown == {
        "FCCA": ["35.0 s", "0.81 s", "262", "3.5 min", "4.1 min", "14 %", "6.92 GB", "reference"],
        "LoRA": ["none", "0.92 s", "262", "4.0 min", "4.0 min", "n/a", "7.19 GB", "318"],
        "DoRA": ["none", "1.31 s", "262", "5.7 min", "5.7 min", "n/a", "7.27 GB", "70"],
        "PiSSA": ["41.0 s", "1.76 s", "262", "7.7 min", "8.4 min", "8 %", "7.20 GB", "always"],
    }


def test_trained_values_are_told_apart_as_cores_factors_and_magnitudes(paper):
    (costs,) = study_costs(paper)
    shown = {line[0].text: [cell.text for cell in line[1:]] for line in state_sheet(costs, "s").rows}
    assert shown["FCCA"][:4] == ["36,864", "36,864", "0", "0"]
    assert shown["FCCA"][4:] == ["442.37 kB", "29.64 MB", "147.46 kB", "6.00 GB"]
    assert shown["LoRA"][1:4] == ["0", "7,372,800", "0"]
    assert shown["DoRA"][1:4] == ["0", "7,372,800", "165,888"]


def test_a_comparison_pools_its_tasks_and_a_profile_keeps_them_apart(study):
    two = PROFILE.replace("task: [svamp]", "task: [svamp, gsm8k]")

    def record(axes):
        return record_content(axes, calibration_s=1.0 if axes["task"] == "svamp" else 3.0)

    apart = study_costs(study(two, record))
    assert [(costs.group, costs.costs[0].phases.initialisation_s) for costs in apart] == [
        ({"task": "svamp"}, 1.0),
        ({"task": "gsm8k"}, 3.0),
    ]
    (pooled,) = study_costs(study(two.replace("kind: profile", "kind: tune"), record))
    assert (pooled.costs[0].phases.initialisation_s, len(pooled.costs[0].records)) == (2.0, 2)


def test_what_was_not_measured_is_not_available_and_never_nought(study):
    def record(axes):
        resources = {**RESOURCES, "step_s": 2.0 if axes["method"] == "fcca" else None}
        one = {"calibration_s": 0.05, "peak_memory_bytes": 1_500, "training": {"num_steps": 1}}
        return record_content(axes, resources=resources, **one)

    (costs,) = study_costs(study(PROFILE, record))
    rows = {line[0].text: line[1:] for line in time_sheet(costs, "t", alone=False).rows}
    assert [cell.text for cell in rows["LoRA"]] == ["none", "n/a", "1", "n/a", "n/a", "n/a", "1.50 kB", "n/a"]
    assert (rows["LoRA"][1].hint, rows["LoRA"][-1].hint) == ("not measured", "no step was measured")
    assert rows["LoRA"][1].value is None
    assert rows["FCCA"][1].text == "2.00 s"


def test_the_norm_of_the_cores_gradient_is_a_column_where_runs_have_measured_it(study):
    yaml = """
  s:
    title: S
    axes: {model: [small], task: [svamp], method: [fcca, lora], seed: [42, 43]}
"""
    norms = {42: 2.0, 43: 3.0}

    def record(axes):
        measured = {**alignment_content(0.5), "gradient": norms[axes["seed"]]}
        return record_content(axes, alignment=measured if axes["method"] == "fcca" else None)

    (costs,) = study_costs(study(yaml, record))
    sheet = state_sheet(costs, "s")
    assert sheet.headings[-1] == "‖PᵀGQ‖"
    assert {line[0].text: (line[-1].text, line[-1].is_empty) for line in sheet.rows} == {
        "FCCA": ("2.5", False), "LoRA": ("n/a", False),
    }  # fmt: skip
