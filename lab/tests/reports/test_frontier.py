"""Loss against trained values, on records whose loss is linear in the logarithm of the trained values."""

from __future__ import annotations

import math
from functools import partial

import pytest
from matplotlib import pyplot as plt
from scipy import stats

from frozencore.errors import ConfigError
from frozencore_lab.reports.campaign import campaign_document
from frozencore_lab.reports.frontier import at_equal_values, frontier_points, frontier_section

STUDIES = """
  cores:
    title: Cores in rounds, by budget
    axes: {model: [small], task: [svamp, gsm8k], rank_budget: [1000, 4000, 16000], seed: [42, 43, 44]}
    report: {rows: [task], columns: [rank_budget]}
  loras:
    title: LoRA on attention, at the best rate
    axes: {model: [small], task: [svamp, gsm8k], rank: [1, 8], seed: [42, 43, 44]}
    fixed: {method: lora}
    report: {rows: [task], columns: [rank]}
  vectors:
    title: Vectors of other methods
    axes: {model: [small], task: [svamp], method: [dora, pissa], seed: [42, 43, 44]}
  apart:
    title: Not drawn
    axes: {model: [small], task: [svamp], rank: [4], seed: [42]}
    report: {columns: [rank]}
"""
NAMED = "frontier: [cores, loras, vectors]\n"
SEEDS = {42: -0.01, 43: 0.0, 44: 0.01}
CORES, LORA, ATTENTION = "Cores in rounds", "LoRA on attention", 2000
ROUNDS = 4


def trained_by(axes):
    if axes.get("method") in ("dora", "pissa"):
        return 500
    return axes["rank_budget"] if "rank_budget" in axes else ATTENTION * axes["rank"]


@pytest.fixture
def told(results, make_record):
    """Cores are 0.2 below LoRA, and everything falls by a tenth for e times the values."""

    def make(yaml=STUDIES + NAMED, missing=None):
        def record(axes):
            if missing is not None and missing(axes):
                return None
            offset = (3.0 if "rank_budget" in axes else 3.2) + (5 if axes["task"] == "gsm8k" else 0)
            trained = trained_by(axes)
            loss = offset - 0.1 * math.log(trained) + SEEDS[axes["seed"]]
            return make_record(
                axes, held_out_loss=loss, values_at_once=trained, state_held_bytes=12 * trained,
                values_in_all=trained * (ROUNDS if "rank_budget" in axes else 1), saved_bytes=4 * trained,
            )  # fmt: skip

        return results(yaml, record)

    return make


def sheet(results, name):
    section = frontier_section(results)
    (found,) = (table.sheet for table in section.tables if table.sheet.name == name)
    return [dict(zip(found.headings, line, strict=True)) for line in found.rows]


def test_a_line_holds_the_mean_its_interval_and_the_costs(told) -> None:
    lines = {(line["family"].text, line["size"].text): line for line in sheet(told(), "frontier")}
    assert list(lines) == [
        (CORES, "rank budget 1000"), (CORES, "rank budget 4000"), (CORES, "rank budget 16000"), (LORA, "r 1"),
        (LORA, "r 8"), ("DoRA", "-"), ("PiSSA", "-"),
    ]  # fmt: skip
    line = lines[LORA, "r 8"]
    losses = [8.2 - 0.1 * math.log(16000) + shift for shift in SEEDS.values()]
    low, high = stats.t.interval(0.95, 2, loc=losses[1], scale=stats.sem(losses))
    assert line["GSM8K"].value == pytest.approx(losses[1])
    assert (lines["DoRA", "-"]["GSM8K"].text, lines["DoRA", "-"]["GSM8K"].is_empty) == ("n/a", False)
    assert line["GSM8K"].spread == f"{(high - low) / 2:.3f}"
    assert (line["at once"].text, line["state held"].text, line["saved"].text) == ("16,000", "192.00 kB", "64.00 kB")
    cores = lines[CORES, "rank budget 4000"]
    assert (cores["at once"].text, cores["in all"].text, cores["base model"].text) == ("4,000", "16,000", "6.00 GB")


def test_the_first_family_is_compared_at_equal_values_within_what_was_measured(told) -> None:
    lines = {(line["task"].text, line["values at once"].text): line for line in sheet(told(), "frontier-ahead")}
    for task in ("SVAMP", "GSM8K"):
        assert lines[task, "4,000"][LORA].value == pytest.approx(-0.2)
        assert lines[task, "16,000"][LORA].value == pytest.approx(-0.2)
        assert lines[task, "1,000"][LORA].text == "n/a"


def test_at_equal_values_in_all_a_core_in_rounds_pays_for_every_round(told) -> None:
    """Its loss is that of a quarter of the values that it trained: the gap shrinks by a tenth of log 4."""
    lines = {(line["task"].text, line["values in all"].text): line for line in sheet(told(), "frontier-ahead-in-all")}
    for task in ("SVAMP", "GSM8K"):
        assert lines[task, "4,000"][LORA].value == pytest.approx(-0.2 + 0.1 * math.log(ROUNDS))
        assert lines[task, "64,000"][LORA].text == "n/a"


def test_a_number_just_beyond_the_end_of_what_was_measured_counts_as_the_end(told) -> None:
    points = [point for point in frontier_points(told()) if point.family == LORA and point.panel == "SVAMP"]
    at = partial(at_equal_values, points, count="at_once")
    ends = {point.trained("at_once"): point.loss for point in points}
    assert at(1950) == at(2000) == pytest.approx(ends[2000])
    assert at(16_500) == pytest.approx(ends[16_000])
    assert at(1800) is at(17_000) is None


def test_a_family_of_one_size_is_compared_there_alone(told) -> None:
    lines = {(line["task"].text, line["values at once"].text): line for line in sheet(told(), "frontier-ahead")}
    for task in ("SVAMP", "GSM8K"):
        assert lines[task, "4,000"]["PiSSA"].text == "n/a"


def test_a_size_that_lacks_a_seed_is_left_out(told) -> None:
    def missing(axes):
        return axes.get("rank") == 8 and axes["seed"] == 44 and axes["task"] == "svamp"

    lines = {(line["family"].text, line["size"].text): line for line in sheet(told(missing=missing), "frontier")}
    assert lines[LORA, "r 8"]["SVAMP"].is_empty
    assert lines[LORA, "r 8"]["GSM8K"].value is not None
    assert frontier_section(told(missing=lambda _: True)) is None


def test_the_figure_has_two_panels_a_task_and_a_line_a_family_over_the_logarithm_of_both_counts(told) -> None:
    section = frontier_section(told())
    figure = section.drawings[0].draw()
    panels = {(axis.get_title(loc="left"), axis.get_xlabel()): axis for axis in figure.axes}
    assert list(panels) == [
        (task, count) for count in ("values at once", "values in all") for task in ("SVAMP", "GSM8K")
    ]
    assert {axis.get_xscale() for axis in panels.values()} == {"log"}
    for count, times in (("values at once", 1), ("values in all", ROUNDS)):
        axis = panels["GSM8K", count]
        drawn = {box.get_label(): box.lines[0] for box in axis.containers if len(box.lines[0].get_xdata())}
        assert {name: list(line.get_xdata()) for name, line in drawn.items()} == {
            CORES: [1000 * times, 4000 * times, 16000 * times],
            LORA: [2000, 16000],
        }
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {CORES, LORA, "DoRA", "PiSSA"}
    plt.close(figure)


def test_one_task_alone_has_both_panels_side_by_side(told) -> None:
    figure = frontier_section(told(STUDIES.replace("[svamp, gsm8k]", "[svamp]") + NAMED)).drawings[0].draw()
    left, right = figure.axes
    assert (left.get_xlabel(), right.get_xlabel()) == ("values at once", "values in all")
    assert left.get_subplotspec().rowspan == right.get_subplotspec().rowspan
    plt.close(figure)


def test_only_a_campaign_that_names_studies_has_the_section(told) -> None:
    assert campaign_document(told()).sections[0].name == "frontier"
    assert frontier_section(told(STUDIES)) is None


def test_an_unknown_study_and_one_without_training_are_one_line(campaign) -> None:
    with pytest.raises(ConfigError, match="study 'core'. Did you mean 'cores'"):
        campaign(STUDIES + "frontier: [core]\n")
    stable = """
  s:
    {title: S, kind: stability, reference_size: 8, axes: {model: [small], task: [svamp], seed: [42]},
     report: {columns: [task]}}
"""
    with pytest.raises(ConfigError, match="trains nothing: s has no place in frontier"):
        campaign(STUDIES + stable + "frontier: [s]\n")
