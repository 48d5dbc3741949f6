"""Intervals over items: of answers that are known, beside the test over tasks; and what is said where none are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from frozencore_lab.reports.campaign import study_section
from frozencore_lab.reports.tables.items import item_gains, item_sheet
from frozencore_lab.reports.tables.pivot import ACCURACY, LOSS, pivots
from frozencore_lab.reports.tables.significance import compare

STUDY = """
  budget:
    title: Matched budget
    axes:
      model: [small]
      task: [svamp, gsm8k]
      method: [fcca, rawgrad, eva]
      seed: [42, 43]
    report: {rows: [task], columns: [method], reference: fcca}
"""
SIZES = {"svamp": 40, "gsm8k": 60}


def answers(axes, share):
    draw = random.Random(repr(sorted(axes.items())))
    return "".join("1" if draw.random() < share else "0" for _ in range(SIZES[axes["task"]]))


@pytest.fixture
def answered(study, make_record):
    """A study whose accuracies are those of its answers; ``instead`` gives other answers, or None for none."""

    def make(instead=lambda axes, correct: correct, hashes=lambda axes: "e1" * 32, yaml=STUDY):
        def record(axes):
            correct = answers(axes, 0.8 if axes["method"] == "fcca" else 0.5)
            given = instead(axes, correct)
            score = {"standard_error": 0.02, "chance": 0.5} | ({"correct": given} if given is not None else {})
            own = {"model": "a1" * 32, "evaluation": hashes(axes)}
            return make_record(axes, accuracy=correct.count("1") / len(correct), score=score, hashes=own)

        return study(yaml, record)

    return make


def test_the_mean_differences_are_those_of_the_comparison_over_tasks(answered):
    (pivot,) = pivots(answered(), ACCURACY)
    gains, remark = item_gains(pivot)
    assert remark == ""
    comparison, _ = compare(pivot)
    sheet = item_sheet(pivot, gains, comparison, "t")
    assert [line[0].text for line in sheet.rows] == ["RawGrad", "EVA-core"]
    for line, pair in zip(sheet.rows, comparison.pairs, strict=True):
        assert line[1].value == pytest.approx(pair.mean_difference)
        assert line[2].text == f"{pair.interval[0]:+.2f} to {pair.interval[1]:+.2f}"
        assert line[3].value == pair.wilcoxon_p
    assert sheet.headings[2:] == ("over tasks", "Wilcoxon p", "over items", "over tasks, seeds and items")
    assert "paired on 100 scored items of 2 tasks under 2 seeds" in sheet.note


def test_the_interval_over_items_is_what_the_items_of_each_task_alone_say(answered):
    """Twenty points of difference on a hundred items: the interval is above 0 and about as wide as theory has it."""
    (pivot,) = pivots(answered(), ACCURACY)
    gains, _ = item_gains(pivot)
    line = item_sheet(pivot, gains, None, "t").rows[0]
    low, high = (float(part) for part in line[2].text.split(" to "))
    variance = sum(gain[:, :, 0].mean(axis=0).var() / gain.shape[1] for gain in gains.by_task.values()) / 4
    assert 0 < low < line[1].value < high
    assert high - low == pytest.approx(2 * 196 * variance**0.5, rel=0.1)
    low_all, high_all = (float(part) for part in line[3].text.split(" to "))
    assert high_all - low_all > high - low


def test_equal_answers_are_no_difference_with_no_interval_to_speak_of(answered):
    same = answered(lambda axes, correct: answers({"task": axes["task"], "seed": axes["seed"]}, 0.7))
    (pivot,) = pivots(same, ACCURACY)
    line = item_sheet(pivot, item_gains(pivot)[0], None, "t").rows[0]
    assert [cell.text for cell in line[1:]] == ["0.00", "+0.00 to +0.00", "+0.00 to +0.00"]


def test_a_study_of_a_single_task_has_items_but_no_tasks_to_draw(answered):
    (pivot,) = pivots(answered(yaml=STUDY.replace("[svamp, gsm8k]", "[svamp]")), ACCURACY)
    sheet = item_sheet(pivot, item_gains(pivot)[0], None, "t")
    assert sheet.headings == ("column", "mean Δ", "over items")
    assert [" to " in line[2].text for line in sheet.rows] == [True, True]
    assert "scored items of 1 task under 2 seeds" in sheet.note
    assert sheet.note.endswith("draws: of items.")


def test_the_differences_by_task_stand_among_the_details(answered):
    section = study_section(answered())
    assert [table.sheet.name for table in section.main] == ["budget", "budget-significance", "budget-items"]
    (sheet,) = (table.sheet for table in section.details if table.sheet.name == "budget-items-by-task")
    assert [line[0].text for line in sheet.rows] == ["SVAMP", "GSM8K"]
    assert [line[-1].text for line in sheet.rows] == ["40", "60"]
    (pivot,) = pivots(answered(), ACCURACY)
    gain = pivot.cells[("svamp",), ("fcca",)].mean - pivot.cells[("svamp",), ("eva",)].mean
    assert sheet.rows[0][2].text.startswith(f"{gain:+.1f} [")


def test_a_column_that_was_scored_on_other_rows_or_does_not_say_is_left_out(answered):
    others = answered(hashes=lambda axes: ("e2" if axes["method"] == "eva" and axes["seed"] == 43 else "e1") * 32)
    shorter = answered(lambda axes, correct: correct[:-1] if axes["method"] == "eva" else correct)
    silent = answered(lambda axes, correct: None if (axes["method"], axes["task"]) == ("eva", "svamp") else correct)
    for results in (others, shorter, silent):
        (pivot,) = pivots(results, ACCURACY)
        gains, _ = item_gains(pivot)
        assert (gains.others, gains.left_out) == ((("rawgrad",),), (("eva",),))
        assert "Left out, as their records lack answers: EVA-core." in item_sheet(pivot, gains, None, "t").note


def test_where_no_record_says_which_rows_were_right_the_report_says_so(answered):
    section = study_section(answered(lambda axes, correct: None))
    (table,) = (table for table in section.main if table.sheet.name == "budget-significance")
    assert table.remark == "No interval over items: none of the 12 records says which rows its run got right."
    assert "items" not in [table.sheet.name for table in section.tables]


def test_a_reference_that_lacks_answers_has_nothing_to_be_compared_on(answered):
    results = answered(lambda axes, correct: None if axes["method"] == "fcca" else correct)
    found = item_gains(pivots(results, ACCURACY)[0])
    assert found == (None, "No interval over items: no column has all runs on the reference's rows.")


def test_only_accuracies_of_tasks_by_columns_with_a_reference_have_items(answered):
    assert item_gains(pivots(answered(), LOSS)[0]) == (None, "")
    unnamed = answered(yaml=STUDY.replace(", reference: fcca", ""))
    assert item_gains(pivots(unnamed, ACCURACY)[0]) == (None, "")
    (pivot,) = pivots(answered(), ACCURACY)
    none_done = replace(pivot, cells={key: replace(cell, runs=()) for key, cell in pivot.cells.items()})
    assert item_gains(none_done) == (None, "")
