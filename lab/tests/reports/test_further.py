"""Runs that diverged: what counts as 0 and is marked, and the paper's table "noqr-lr-sweep"."""

from __future__ import annotations

import pytest

from frozencore_lab.reports.pivot import ACCURACY, LOSS, pivots, runs_csv
from frozencore_lab.reports.report import study_section
from frozencore_lab.reports.sheet import latex
from frozencore_lab.reports.tables import pivot_sheet

RATES = """
  no-qr-rates:
    title: No QR
    fixed: {coordinates: raw}
    axes: {model: [small], task: [svamp, arc_challenge, gsm8k], learning_rate: [5e-3, 2e-3, 1e-3, 5e-4], seed: [42, 43]}
    report: {rows: [task], columns: [learning_rate], mean: false, best: true, diverged_as_zero: true}
"""
DIVERGED = {"reason": "diverged", "message": "the loss is nan"}


@pytest.fixture
def swept(study, make_record):
    """The paper's sweep: only ARC-C trains, at chance; ``others`` replaces an outcome by (task, rate, seed)."""

    def make(others=None, yaml=RATES):
        def record(axes):
            key = axes["task"], axes["learning_rate"], axes["seed"]
            if others and key in others:
                return others[key]
            if axes["task"] != "arc_challenge":
                return DIVERGED
            accuracy = {5e-3: 0.2, 2e-3: 0.227, 1e-3: 0.21, 5e-4: 0.22}[axes["learning_rate"]]
            return make_record(axes, accuracy=accuracy, score={"standard_error": 0.0187, "chance": 0.25})

        return study(yaml, record)

    return make


def best(results):
    (table,) = (one for one in study_section(results).main if one.sheet.name == "no-qr-rates-best")
    return [[cell.text for cell in line] for line in table.sheet.rows]


def test_the_best_of_the_sweep_and_its_outcome_are_the_papers(swept):
    assert best(swept()) == [
        ["SVAMP", "0.0†", "lr 0.005", "all 8 runs diverged"],
        ["ARC-C", "22.7", "lr 0.002", "no better than chance (25 %)"],
        ["GSM8K", "0.0†", "lr 0.005", "all 8 runs diverged"],
    ]


def test_what_trains_clearly_above_chance_is_not_said_to_be_at_it(swept, make_record):
    good = make_record(
        {"task": "arc_challenge", "seed": 42}, accuracy=0.6, score={"standard_error": 0.02, "chance": 0.25}
    )
    found = best(swept({("arc_challenge", 5e-4, seed): good for seed in (42, 43)}))
    assert found[1] == ["ARC-C", "60.0", "lr 0.0005", "all runs trained"]


def test_runs_that_failed_otherwise_or_are_missing_are_counted_apart(swept):
    failed = {"reason": "out of memory", "message": "too large"}
    others = {("svamp", rate, 42): failed for rate in (5e-3, 2e-3)} | {("svamp", 1e-3, 43): None}
    found = best(swept(others))[0]
    assert found[2:] == ["lr 0.0005", "5 of 8 runs diverged; 2 of 8 runs failed; 1 of 8 runs missing"]


def test_a_run_that_diverged_counts_as_0_is_marked_and_tells_why(swept):
    (pivot,) = pivots(swept(), ACCURACY)
    sheet = pivot_sheet(pivot, "t")
    cell = sheet.rows[0][1]
    assert (cell.text, cell.spread, cell.value) == ("0.0†", "0.0", 0.0)
    assert cell.hint == "seed 42: 0.0 (diverged: the loss is nan); seed 43: 0.0 (diverged: the loss is nan)"
    assert "† 16 of 24 runs diverged and count as 0.0." in sheet.note
    assert r"0.0$^\dagger$" in latex(sheet)
    assert "svamp,0.005,42,0.0,diverged," in runs_csv(pivot)


def test_where_all_runs_diverged_no_cell_is_the_best(swept, make_record):
    (pivot,) = pivots(swept({("gsm8k", 5e-3, seed): make_record({"task": "gsm8k"}) for seed in (42, 43)}), ACCURACY)
    svamp, _, gsm8k = pivot_sheet(pivot, "t").rows
    assert not any(cell.best for cell in svamp)
    assert [cell.best for cell in gsm8k[1:5]] == [True, False, False, False]


def test_one_seed_that_diverged_is_in_the_mean_as_0(swept, make_record):
    half = {("svamp", 5e-3, 43): make_record({"task": "svamp", "seed": 43}, accuracy=0.5)}
    (pivot,) = pivots(swept(half), ACCURACY)
    assert pivot_sheet(pivot, "t").rows[0][1].text == "25.0†"


def test_other_failures_stay_empty_cells(swept):
    died = {"reason": "worker died", "message": "gone"}
    (pivot,) = pivots(swept({("svamp", 5e-3, seed): died for seed in (42, 43)}), ACCURACY)
    cells = pivot_sheet(pivot, "t").rows[0]
    assert (cells[1].text, cells[1].value) == ("failed", None)
    assert cells[2].text == "0.0†"


def test_a_loss_that_diverged_is_never_a_number(swept):
    (pivot,) = pivots(swept(), LOSS)
    assert [cell.text for cell in pivot_sheet(pivot, "t").rows[0][1:5]] == ["div."] * 4


def test_without_the_option_what_diverged_leaves_its_cell_empty(swept):
    (pivot,) = pivots(swept(yaml=RATES.replace(", diverged_as_zero: true", "")), ACCURACY)
    assert [cell.text for cell in pivot_sheet(pivot, "t").rows[0][1:5]] == ["div."] * 4
