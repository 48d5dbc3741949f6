"""The contents of a study's figure, read off its axes."""

from __future__ import annotations

from typing import get_args

import pytest
from matplotlib import pyplot as plt

from frozencore.tune.figures import plain_ticks
from frozencore_lab.campaign.spec import Figure
from frozencore_lab.reports.figures import DRAWN, study_drawings
from small_runs import record_content

BY_RANK = """
  ranks:
    title: Ranks
    axes: {model: [small], task: [svamp, gsm8k], rank: [8, 16, 32], seed: [42]}
    report: {rows: [rank], columns: [task], figure: lines}
"""
STATE = """
  state:
    title: Trained state
    axes: {model: [small, large], task: [svamp], method: [fcca, rawgrad, eva, lora], seed: [42]}
    report: {rows: [task], columns: [method], figure: state}
"""


@pytest.fixture
def drawn():
    """The axes of a study's figures by file name."""

    def draw(results):
        found = {drawing.name: drawing.draw() for drawing in study_drawings(results)}
        for figure in found.values():
            plt.close(figure)
        return {name: figure.axes[0] for name, figure in found.items()}

    return draw


def test_where_the_tasks_are_columns_each_is_a_line_against_the_rows(study, drawn):
    results = study(
        BY_RANK, lambda axes: record_content(axes, accuracy=axes["rank"] / 64 + (axes["task"] == "svamp") / 4)
    )
    axis = drawn(results)["ranks"]
    bars, names = axis.get_legend_handles_labels()
    lines = {name: list(map(float, bar.lines[0].get_ydata())) for name, bar in zip(names, bars, strict=True)}
    assert lines == {"SVAMP": [37.5, 50.0, 75.0], "GSM8K": [12.5, 25.0, 50.0]}
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["8", "16", "32"]


def test_methods_that_score_alike_differ_in_colour_and_marker_and_are_named_in_the_legend(study, drawn):
    scores = {"fcca": 0.700, "rawgrad": 0.7001, "eva": 0.6999, "lora": 0.9}
    results = study(STATE, lambda axes: record_content(axes, accuracy=scores[axes["method"]]))
    axis = drawn(results)["state-small"]
    points = {line.get_label(): line for line in axis.lines}
    assert {name: round(float(line.get_ydata()[0]), 4) for name, line in points.items()} == {
        "FCCA": 70.0, "RawGrad": 70.01, "EVA-core": 69.99, "LoRA": 90.0,
    }  # fmt: skip
    assert len({line.get_color() for line in points.values()}) == 4
    assert len({line.get_marker() for line in points.values()}) == 4
    assert [text.get_text() for text in axis.figure.legends[0].get_texts()] == list(points)


def test_cores_and_lora_are_two_lines_of_loss_and_of_forgetting_against_trained_values(study, drawn):
    yaml = """
  sizes:
    title: Sizes
    axes: {model: [small], task: [svamp], method: [fcca, fcca-r8, lora], seed: [42, 43]}
    variants: {fcca-r8: {method: fcca, rank: 8}}
    report: {rows: [task], columns: [method], reference: fcca, figure: values}
"""
    counts = {"fcca": 400, "fcca-r8": 100, "lora": 1000}

    def record(axes):
        other = {"loss_before": 1.0, "loss": 1.0 + counts[axes["method"]] / 1000}
        made = record_content(axes, num_trainable=counts[axes["method"]], forgetting={"gsm8k": other})
        return made | {"held_out_loss": 2.0 - counts[axes["method"]] / 1000 + axes["seed"] / 100}

    (figure,) = (drawing.draw() for drawing in study_drawings(study(yaml, record)))
    plt.close(figure)
    for axis, means in zip(figure.axes, ([2.325, 2.025, 1.425], [0.1, 0.4, 1.0]), strict=True):
        cores, lora = axis.get_legend_handles_labels()[0]
        assert list(cores.lines[0].get_xdata()) == [100, 400]
        assert list(lora.lines[0].get_xdata()) == [1000]
        assert [*cores.lines[0].get_ydata(), *lora.lines[0].get_ydata()] == pytest.approx(means)
        assert [text.get_text() for text in axis.texts] == ["r8", "FCCA", "LoRA"]


def made_perfect(*tasks):
    """A record whose accuracy is perfect on some tasks."""
    return lambda axes: record_content(axes, accuracy=1.0 if axes["task"] in tasks else 0.5)


@pytest.mark.parametrize(
    ("perfect", "panels", "left_out"),
    [([], ["SVAMP", "GSM8K"], []), (["svamp"], ["GSM8K"], ["SVAMP"]), (["svamp", "gsm8k"], ["SVAMP", "GSM8K"], [])],
)
def test_a_task_on_which_every_score_is_perfect_is_not_drawn_but_named_if_others_are_left(
    perfect, panels, left_out, study
):
    yaml = """
  panels:
    title: Panels
    axes: {model: [small], task: [svamp, gsm8k], method: [fcca, lora], seed: [42, 43]}
    report: {rows: [task], columns: [method], figure: panels}
"""
    accuracy, loss = study_drawings(study(yaml, made_perfect(*perfect)))
    for drawing, shown in ((accuracy, panels), (loss, ["SVAMP", "GSM8K"])):
        figure = drawing.draw()
        assert [axis.get_title("left") for axis in figure.axes] == shown
        plt.close(figure)
    assert [name for name in ("SVAMP", "GSM8K") if name in accuracy.remark] == left_out
    assert loss.remark == ""


def test_a_task_that_one_method_does_not_solve_wholly_is_drawn_and_so_is_a_perfect_method(study, drawn):
    yaml = """
  panels:
    title: Panels
    axes: {model: [small], task: [svamp, gsm8k], method: [fcca, lora], seed: [42]}
    report: {rows: [task], columns: [method], figure: panels}
"""
    found = drawn(study(yaml, lambda axes: record_content(axes, accuracy=1.0 if axes["method"] == "fcca" else 0.9)))
    assert [axis.get_title("left") for axis in found["panels"].figure.axes] == ["SVAMP", "GSM8K"]


def test_a_perfect_task_is_left_out_where_the_tasks_are_columns(study, drawn):
    assert drawn(study(BY_RANK, made_perfect("svamp")))["ranks"].get_legend_handles_labels()[1] == ["GSM8K"]


@pytest.mark.parametrize(("methods", "legend"), [(["full"], []), (["fcca", "lora", "dora"], ["cores", "LoRA, DoRA"])])
def test_a_figure_of_values_names_the_factors_that_it_has_and_may_have_neither_kind(methods, legend, study, drawn):
    yaml = f"""
  sizes:
    title: Sizes
    axes: {{model: [small], task: [svamp], method: [{", ".join(methods)}], seed: [42, 43]}}
    report: {{rows: [task], columns: [method], figure: values}}
"""

    def record(axes):
        return record_content(axes, num_trainable=10 + 90 * methods.index(axes["method"]))

    (figure,) = (drawing.draw() for drawing in study_drawings(study(yaml, record)))
    plt.close(figure)
    assert figure.axes[0].get_legend_handles_labels()[1] == legend


def test_every_figure_that_a_campaign_may_ask_for_is_a_row() -> None:
    assert set(DRAWN) == {*get_args(Figure), "convergence"}  # which is not asked for: a study of bases always has it


def test_a_logarithmic_axis_is_labelled_with_plain_numbers() -> None:
    figure, axis = plt.subplots()
    axis.plot([50, 2e6], [1, 2])
    axis.set_xscale("log")
    plain_ticks(axis.xaxis)
    figure.canvas.draw()
    said = [label.get_text() for label in axis.get_xticklabels() if label.get_text()]
    assert {"100", "1k", "10k", "100k", "1M"} <= set(said)
    plt.close(figure)
