"""Differences against the paper's tables "mismatch", "whitening-full" and "side-svamp", from its printed means."""

from __future__ import annotations

import pytest

from frozencore.errors import ConfigError
from frozencore_lab.reports.pivot import ACCURACY, LOSS, pivots
from frozencore_lab.reports.tables import pivot_sheet

MISMATCH = {"svamp": 79.7, "gsm8k": 78.0, "arc_challenge": 74.6, "sst2": 72.6}
SIDES = {
    "svamp": (73.4, 76.7, 76.7, 79.7), "arc_challenge": (74.7, 83.2, 80.7, 83.1), "sst2": (92.4, 95.1, 94.8, 95.1),
    "rte": (71.7, 89.3, 88.4, 88.2), "mrpc": (80.4, 88.4, 87.3, 88.4), "winogrande": (55.6, 70.6, 68.1, 72.8),
}  # fmt: skip
STUDY = """
  sides:
    title: T
    axes: {{model: [small], task: [{tasks}], {axis}, seed: [42, 43]}}
    report: {{{report}}}
"""
WHITEN = "whiten: [none, input, output, both]"
SOURCES = "calibration_task: [svamp, gsm8k, arc_challenge, sst2]"


@pytest.fixture
def sheet(study, make_record):
    def make(tasks, axis, report, accuracy, measure=ACCURACY):
        def record(axes):
            found = accuracy(axes)
            return None if found is None else make_record(axes, accuracy=found / 100, held_out_loss=1 - found / 100)

        text = STUDY.format(tasks=", ".join(tasks), axis=axis, report=report)
        (pivot,) = pivots(study(text, record), measure)
        return pivot_sheet(pivot, "t")

    return make


def side(axes):
    return SIDES[axes["task"]][("none", "input", "output", "both").index(axes["whiten"])]


def test_both_less_none_is_a_column_with_the_papers_numbers(sheet):
    report = "rows: [task], columns: [whiten], reference: none, differences: [both]"
    found = sheet(SIDES, WHITEN, report, side)
    assert found.headings[4:6] == ("Both", "Both − None")
    assert [line[5].text for line in found.rows] == ["+6.3", "+8.4", "+2.7", "+16.5", "+8.0", "+17.2"]
    assert [line[5].value for line in found.rows][3] == 16.5  # what ties in print ties here


def test_a_single_task_has_its_differences_below_where_none_are_asked_for(sheet):
    found = sheet(["svamp"], WHITEN, "rows: [task], columns: [whiten], reference: none", side)
    assert [cell.text for cell in found.foot[-1][:5]] == ["Δ from None", "0.0 (ref.)", "+3.3", "+3.3", "+6.3"]
    assert "less the reference's" in found.note


def test_where_the_tasks_are_columns_the_differences_are_the_papers_column(sheet):
    report = "rows: [calibration_task], columns: [task], reference: matched"
    found = sheet(["svamp"], SOURCES, report, lambda axes: MISMATCH[axes["calibration_task"]])
    assert found.headings == ("calibrated on", "SVAMP", "Δ from matched")
    shown = {line[0].text: (line[1].text, line[2].text) for line in found.rows}
    assert shown == {
        "SVAMP": ("79.7", "0.0 (ref.)"),
        "GSM8K": ("78.0", "-1.7"),
        "ARC-C": ("74.6", "-5.1"),
        "SST-2": ("72.6", "-7.1"),
    }


def test_matched_is_another_row_for_each_task(sheet):
    report = "rows: [calibration_task], columns: [task], reference: matched, mean: false"
    found = sheet(
        ["svamp", "gsm8k"], "calibration_task: [svamp, gsm8k]", report,
        lambda axes: 80 if axes["task"] == axes["calibration_task"] else 70 - (axes["task"] == "gsm8k"),
    )  # fmt: skip
    assert found.headings[3:] == ("SVAMP: Δ", "GSM8K: Δ")
    assert [[cell.text for cell in line[3:]] for line in found.rows] == [
        ["0.0 (ref.)", "-11.0"],
        ["-10.0", "0.0 (ref.)"],
    ]


def test_the_sign_is_the_same_where_lower_is_better(sheet):
    report = "rows: [task], columns: [whiten], reference: none, differences: [both]"
    found = sheet(["svamp", "rte"], WHITEN, report, side, LOSS)
    assert [line[5].text for line in found.rows] == ["-0.063", "-0.165"]


def test_a_difference_from_a_mean_that_is_missing_is_no_number(sheet):
    report = "rows: [task], columns: [whiten], reference: none, differences: [both]"
    found = sheet(["svamp"], WHITEN, report, lambda axes: None if axes["whiten"] == "none" else side(axes))
    assert (found.rows[0][5].text, found.rows[0][5].hint) == ("n/a", "a mean is missing")


def test_a_difference_tells_its_seeds(sheet):
    report = "rows: [task], columns: [whiten], reference: none, differences: [both]"
    found = sheet(["svamp"], WHITEN, report, lambda axes: side(axes) + (axes["seed"] - 42) * (axes["whiten"] == "both"))
    assert found.rows[0][5].hint == "seed 42: +6.3; seed 43: +7.3"


@pytest.mark.parametrize(
    ("report", "says"),
    [
        ("reference: none, differences: [boht]", "no column to show the difference of 'boht'. Did you mean 'both'"),
        ("differences: [both]", "need a reference: one of the columns none, input, output, both"),
    ],
)
def test_a_difference_of_what_is_not_there_is_refused(campaign, report, says):
    with pytest.raises(ConfigError, match=says):
        campaign(STUDY.format(tasks="svamp", axis=WHITEN, report=f"rows: [task], columns: [whiten], {report}"))
