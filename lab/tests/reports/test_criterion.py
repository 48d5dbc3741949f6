"""The criterion against the outcome, of records whose outcome follows from what their bases capture, or does not."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt

from frozencore_lab.campaign.results import CampaignResults
from frozencore_lab.reports.campaign import campaign_document
from frozencore_lab.reports.criterion import correlate, criterion_points, criterion_section
from made_up import criterion_content

STUDIES = """
  budget:
    title: Matched budget
    axes:
      model: [small]
      task: [svamp, gsm8k]
      method: [fcca, rawgrad, eva, random, lora]
      seed: [42, 43]
    report: {rows: [task], columns: [method]}
  ranks:
    title: Ranks
    axes: {model: [small], task: [svamp], rank: [4, 8, 12, 32, 64], seed: [42]}
    report: {rows: [task], columns: [rank]}
"""
TOO_FEW = "fewer than 6 points, or one value for nearly all of them"
SHARES = {"fcca": 0.9, "rawgrad": 0.7, "eva": 0.4, "random": 0.1}


@pytest.fixture
def told(results, make_record):
    """A campaign whose loss falls as the captured share rises; ``instead`` changes a record."""

    def make(instead=lambda axes, record: record, yaml=STUDIES) -> CampaignResults:
        def record(axes):
            share = axes["rank"] / 64 if "rank" in axes else SHARES.get(axes["method"], 0.0)
            scale = 1 if axes["task"] == "svamp" else 50  # another task, another scale of loss
            loss = scale * (2 - share) + 0.001 * (axes["seed"] - 42)
            config = {"model": "m", "task": axes["task"], "method": axes.get("method", "fcca"), "seed": axes["seed"]}
            config |= {"rank": axes.get("rank", 16), "device": f"cuda:{axes['seed'] % 2}"}
            made = make_record(axes, held_out_loss=loss, accuracy=share, config=config)
            if axes.get("method") not in ("lora", "dora"):
                made["criterion"] = criterion_content(share)
            return instead(axes, made)

        return results(yaml, record)

    return make


def runs(results):
    return tuple(run for study in results.studies for run in study.runs)


def sheet(results, name):
    section = criterion_section(results)
    (found,) = (table.sheet for table in section.tables if table.sheet.name == name)
    return {line[0].text: dict(zip(found.headings, line, strict=True)) for line in found.rows}


def test_a_criterion_that_orders_every_task_has_a_correlation_of_one_and_the_right_signs(told):
    found = sheet(told(), "criterion")
    for name in ("J", "J, share", "‖PᵀGQ‖", "‖PᵀGQ‖, share", "first σ", "r-th σ"):
        assert found[name]["held-out loss, within tasks"].text == "-1.00 [-1.00, -1.00]"
        assert found[name]["accuracy, within tasks"].value == pytest.approx(1)
        assert found[name]["points"].value == 4 + 4 + 5
    over_all = found["J"]["held-out loss, over all"].value
    assert -1 < over_all < -0.1  # the two scales of the loss lie between


def test_what_does_not_vary_or_is_not_there_correlates_with_nothing(told):
    found = sheet(told(), "criterion")
    for name in ("effective rank", "participation", "spread of a", "spread of d"):
        cell = found[name]["held-out loss, within tasks"]
        assert (cell.text, cell.value, cell.is_empty) == ("n/a", None, False)  # there is nothing to fill it with
    assert found["spread of d"]["points"].value == 0


def test_a_point_is_a_configuration_with_the_means_over_its_seeds_wherever_they_ran(told):
    results = told()
    points = criterion_points(runs(results))
    assert len(points) == 2 * 4 + 5
    fcca = next(point for point in points if (point.task, point.method) == ("SVAMP", "fcca"))
    assert fcca.values["held-out loss"] == pytest.approx(1.1005)
    assert fcca.values["J"] == pytest.approx(90)


def test_each_task_and_each_study_has_correlations_of_its_own(told):
    results = told()
    by_task = sheet(results, "criterion-loss")["J"]
    assert by_task["SVAMP"].value == pytest.approx(-1)
    assert by_task["SVAMP"].hint == "9 points"
    assert (by_task["GSM8K"].text, by_task["GSM8K"].hint) == ("n/a", TOO_FEW)
    by_study = sheet(results, "criterion-by-study")
    assert list(by_study) == ["budget"]  # ranks has five points
    assert by_study["budget"]["varies"].text == "method"
    assert by_study["budget"]["J"].value == pytest.approx(-1)
    assert by_study["budget"]["points"].value == 8


def test_bases_of_another_tasks_rows_are_left_out(told):
    def instead(axes, record):
        if "rank" in axes:
            record["config"]["calibration_task"] = "gsm8k"
        return record

    results = told(instead)
    assert len(criterion_points(runs(results))) == 8


def test_a_run_that_diverged_has_no_outcome_to_correlate(told):
    results = told(lambda axes, record: {**record, "held_out_loss": None} if axes.get("method") == "eva" else record)
    points = criterion_points(runs(results))
    assert correlate(points, "J", "held-out loss").num_points == len(points) - 2
    assert correlate(points, "J", "accuracy").num_points == len(points)


def test_runs_that_nothing_measured_leave_it_out_for_another_reason(told):
    section = criterion_section(told(lambda axes, record: {**record, "criterion": None}))
    assert section.note.startswith("Left out: no run was measured, as no method here reads the gradient G")
    assert section.tables == ()


def test_a_campaign_without_bases_or_without_runs_has_no_such_section(told, results):
    only_lora = STUDIES.split("  ranks:")[0].replace("[fcca, rawgrad, eva, random, lora]", "[lora, dora]")
    for found in (told(yaml=only_lora), results(STUDIES, lambda axes: None)):
        assert criterion_section(found) is None
        assert "criterion" not in [section.name for section in campaign_document(found).sections]


def test_so_few_points_that_nothing_correlates_are_shown_without_a_table_of_nothing(told):
    few = STUDIES.split("  ranks:")[0].replace("[fcca, rawgrad, eva, random, lora]", "[fcca, random]")
    section = criterion_section(told(yaml=few))
    assert section.note == f"No rank correlation: {TOO_FEW}."
    assert section.tables == ()
    assert [drawing.name for drawing in section.drawings] == ["criterion-points"]


def test_plain_text_has_a_loss_alone(told):
    gone = ("accuracy", "accuracy_before", "score")
    section = criterion_section(told(lambda axes, record: {k: v for k, v in record.items() if k not in gone}))
    assert "accuracy" not in " ".join(section.main[0].sheet.headings)
    assert [table.sheet.name for table in section.details] == ["criterion-loss", "criterion-by-study"]


def test_the_figures_show_every_point_and_every_interval(told):
    intervals, scatter = (drawing.draw() for drawing in criterion_section(told()).drawings)
    (axis,) = intervals.axes
    shown = [line.get_xdata() for line in axis.lines if len(line.get_xdata()) == 1]
    assert sorted(round(float(x[0])) for x in shown) == [-1] * 6 + [1] * 6
    panels = [axis for axis in scatter.axes if axis.get_visible()]
    assert [axis.get_title(loc="left") for axis in panels] == ["SVAMP, ρ = -1.00", "GSM8K"]
    assert [sum(len(line.get_xdata()) for line in axis.lines) for axis in panels] == [9, 4]
    plt.close("all")
