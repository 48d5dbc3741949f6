"""Tables of a study: what is averaged, what is not, and what is marked."""

from __future__ import annotations

from statistics import mean, stdev

import pytest

from frozencore_lab.reports.comparison import compare, read_task_means
from frozencore_lab.reports.pivot import ACCURACY, COSINES, LOSS, averages, means_csv, measures_of, pivots, runs_csv
from frozencore_lab.reports.sheet import latex, markdown
from frozencore_lab.reports.tables import pivot_sheet

BUDGET = """
  budget:
    title: Matched budget
    axes:
      model: [small]
      task: [svamp, gsm8k]
      method: [fcca, rawgrad]
      seed: [42, 43, 44]
    report: {rows: [task], columns: [method], reference: fcca}
"""
SCORES = {
    ("svamp", "fcca"): [0.797, 0.812, 0.782], ("svamp", "rawgrad"): [0.749, 0.769, 0.729],
    ("gsm8k", "fcca"): [0.681, 0.689, 0.673], ("gsm8k", "rawgrad"): [0.6814, 0.6817, 0.6811],
}  # fmt: skip


@pytest.fixture
def scored(make_record):
    """A record of ``SCORES``; ``instead`` replaces the outcome of a (task, method, seed)."""

    def make(instead=None):
        def record(axes):
            key = axes["task"], axes["method"]
            if (*key, axes["seed"]) in (instead or {}):
                return instead[*key, axes["seed"]]
            accuracy = SCORES[key][axes["seed"] - 42]
            return make_record(axes, accuracy=accuracy, held_out_loss=3 - accuracy)

        return record

    return make


def sheet_of(results, measure=ACCURACY):
    (pivot,) = pivots(results, measure)
    return pivot_sheet(pivot, "t")


def texts(line):
    return [f"{cell.text}±{cell.spread}" if cell.spread else cell.text for cell in line]


def test_a_cell_is_the_mean_and_sample_deviation_over_seeds(study, scored):
    sheet = sheet_of(study(BUDGET, scored()))
    first = SCORES["svamp", "fcca"]
    assert texts(sheet.rows[0])[:3] == ["SVAMP", f"{100 * mean(first):.1f}±{100 * stdev(first):.1f}", "74.9±2.0"]


def test_the_best_printed_mean_of_a_row_is_marked_and_a_printed_tie_marks_both(study, scored):
    sheet = sheet_of(study(BUDGET, scored()))
    assert [[cell.best for cell in line[1:3]] for line in sheet.rows] == [[True, False], [True, True]]


def test_lower_loss_is_better(study, scored):
    assert [cell.best for cell in sheet_of(study(BUDGET, scored()), LOSS).rows[0][1:3]] == [True, False]
    turned = study(BUDGET, lambda axes: {**scored()(axes), "held_out_loss": SCORES[axes["task"], axes["method"]][0]})
    assert [cell.best for cell in sheet_of(turned, LOSS).rows[0][1:3]] == [False, True]


def test_the_macro_average_is_over_unrounded_means(study, scored):
    (pivot,) = pivots(study(BUDGET, scored()), ACCURACY)
    line, _ = averages(pivot)
    fcca = line.cells[("fcca",)]
    assert fcca.value == pytest.approx(100 * (mean(SCORES["svamp", "fcca"]) + mean(SCORES["gsm8k", "fcca"])) / 2)
    by_seed = [mean(pair) for pair in zip(SCORES["svamp", "fcca"], SCORES["gsm8k", "fcca"], strict=True)]
    assert fcca.std == pytest.approx(100 * stdev(by_seed))


def test_the_median_over_tasks_of_the_deviation_over_seeds_stands_below_and_none_is_best(study, make_record):
    spreads = {"svamp": 1.0, "gsm8k": 2.0, "sst2": 6.0}  # of three seeds at -s, 0, +s the sample deviation is s

    def record(axes):
        return make_record(axes, accuracy=0.5 + spreads[axes["task"]] / 100 * (axes["seed"] - 43))

    three = BUDGET.replace("[svamp, gsm8k]", "[svamp, gsm8k, sst2]")
    foot = {line[0].text: line[1:3] for line in sheet_of(study(three, record)).foot}
    assert [cell.text for cell in foot["Median std"]] == ["2.0", "2.0"]
    assert not any(cell.best for cell in foot["Median std"])
    single = sheet_of(study(three.replace("[42, 43, 44]", "[42]"), record))
    assert "Median std" not in [line[0].text for line in single.foot]


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (None, "- 2/3"),
        ({"reason": "diverged", "message": "the loss is nan"}, "div. 2/3"),
        ({"reason": "out of memory", "message": "too large"}, "failed 2/3"),
    ],
)
def test_a_cell_that_lacks_a_seed_is_not_averaged_nor_is_its_column(study, scored, outcome, shown):
    results = study(BUDGET, scored({("svamp", "rawgrad", 43): outcome}))
    sheet = sheet_of(results)
    assert sheet.rows[0][2].text == shown
    assert sheet.rows[0][2].value is None
    assert [line[2].text for line in sheet.foot] == ["n/a", "n/a"]
    assert sheet.foot[0][2].hint == "no average without RawGrad on SVAMP"
    assert "no average without RawGrad on SVAMP" in markdown(sheet)
    assert means_csv(pivots(results, ACCURACY)[0]).splitlines()[1].endswith(",")


def test_a_loss_that_is_not_finite_is_diverged_and_never_a_number(study, scored, make_record):
    results = study(BUDGET, lambda axes: make_record(axes, held_out_loss=None if axes["method"] == "fcca" else 1.0))
    assert [cell.text for cell in sheet_of(results, LOSS).rows[0][1:3]] == ["div.", "1.000"]


def test_the_reference_is_compared_only_with_whole_columns(study, scored):
    three = BUDGET.replace("[fcca, rawgrad]", "[fcca, rawgrad, eva]")

    def record(axes):
        if axes["method"] == "eva":
            return None
        return scored()(axes)

    comparison, note = compare(pivots(study(three, record), ACCURACY)[0])
    assert [pair.other for pair in comparison.pairs] == ["rawgrad"]
    assert note == "Left out, as runs are missing: EVA-core."
    comparison, note = compare(pivots(study(BUDGET, scored({("svamp", "fcca", 42): None})), ACCURACY)[0])
    assert comparison is None
    assert note == "No comparison: FCCA lacks runs."


def test_rows_of_one_task_are_no_replications(study, make_record):
    ranks = BUDGET.replace("method:", "rank: [8, 16]\n      method:").replace("rows: [task]", "rows: [task, rank]")
    comparison, note = compare(pivots(study(ranks, make_record), ACCURACY)[0])
    assert comparison is None
    assert "several rows" in note


def test_further_axes_give_a_table_each(study):
    results = study(BUDGET.replace("model: [small]", "model: [small, large]"))
    assert [(pivot.title, pivot.name) for pivot in pivots(results, ACCURACY)] == [
        ("Matched budget, small", "budget-small"),
        ("Matched budget, large", "budget-large"),
    ]


def test_module_lists_are_shown_short_and_tasks_in_columns_are_compared_down(study, make_record):
    results = study(
        """
  modules:
    title: Rank by modules
    axes:
      model: [small]
      task: [svamp, gsm8k]
      rank: [8, 16]
      targets: [[q_proj, v_proj], null]
      seed: [42]
    report: {rows: [rank, targets], columns: [task]}
""",
        lambda axes: make_record(axes, accuracy=axes["rank"] / 32 + (axes["task"] == "gsm8k") / 4),
    )
    sheet = sheet_of(results)
    assert sheet.headings == ("r", "modules", "SVAMP", "GSM8K", "Mean")
    assert texts(sheet.rows[0]) == ["8", "q/v", "25.0", "50.0", "37.5"]
    assert [[cell.best for cell in line[2:]] for line in sheet.rows] == [[False] * 3] * 2 + [[True] * 3] * 2
    assert sheet.rows[1][1].text == "default"


def test_plain_text_tasks_have_no_accuracy_table_but_a_loss(study, make_record):
    def record(axes):
        made = make_record(axes)
        if axes["task"] == "gsm8k":
            del made["accuracy"], made["accuracy_before"], made["score"]
        return made

    mixed = study(BUDGET, record)
    assert measures_of(mixed) == (ACCURACY, LOSS)
    assert pivots(mixed, ACCURACY)[0].rows == (("svamp",),)
    assert pivots(mixed, LOSS)[0].rows == (("svamp",), ("gsm8k",))
    only_text = study(BUDGET.replace("[svamp, gsm8k]", "[gsm8k]"), record)
    assert measures_of(only_text) == (LOSS,)


def test_the_untouched_model_has_a_column_of_its_own_which_is_never_best(study, make_record):
    sheet = sheet_of(study(BUDGET, lambda axes: make_record(axes, accuracy_before=0.99)))
    assert sheet.headings[-1] == "base model"
    assert (sheet.rows[0][-1].text, sheet.rows[0][-1].best) == ("99.0", False)


def test_a_stability_study_shows_its_cosines_and_marks_none_as_best(study):
    results = study(
        """
  stability:
    title: Basis stability
    kind: stability
    reference_size: 512
    axes: {model: [small], task: [svamp], calibration_size: [128, 512], seed: [42, 43]}
    report: {rows: [task], columns: [calibration_size]}
""",
        lambda axes: {"config": {}, "cosine_P": axes["calibration_size"] / 512, "cosine_Q": 1.0},
    )
    assert measures_of(results) == COSINES
    sheet = sheet_of(results, COSINES[0])
    assert texts(sheet.rows[0]) == ["SVAMP", "0.250±0.000", "1.000±0.000"]
    assert not any(cell.best for cell in sheet.rows[0])


def test_the_csv_of_means_is_a_table_that_the_comparison_reads(study, scored, tmp_path):
    (pivot,) = pivots(study(BUDGET, scored()), ACCURACY)
    (tmp_path / "means.csv").write_text(means_csv(pivot))
    table = read_task_means(tmp_path / "means.csv")
    assert list(table.columns) == ["fcca", "rawgrad"]
    assert table.columns["fcca"]["svamp"] == pivot.cells[("svamp",), ("fcca",)].mean
    lines = runs_csv(pivot).splitlines()
    assert lines[0] == "task,method,seed,accuracy,status,run,message"
    assert len(lines) == 1 + 2 * 2 * 3


def test_latex_is_escaped_bold_and_ruled(study, scored):
    titled = BUDGET.replace("Matched budget", '"50 % of a_b & $c #1 ~{x}^2"')
    text = latex(sheet_of(study(titled, scored())))
    assert r"50 \% of a\_b \& \$c \#1 \textasciitilde{}\{x\}\textasciicircum{}2" in text
    assert r"SVAMP & \textbf{79.7{\scriptsize$\pm$1.5}} & 74.9{\scriptsize$\pm$2.0}" in text
    assert text.count(r"\midrule") == 2
    assert text.count("{") - text.count("}") == text.count(r"\{") - text.count(r"\}") == 0


def test_markdown_keeps_its_columns_whatever_the_words(study, scored):
    text = markdown(sheet_of(study(BUDGET.replace("Matched budget", '"a | b *c* <d>"'), scored())))
    assert r"**a \| b \*c\* \<d\>**" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in rows} == {5}
    assert "| **79.7 ± 1.5** |" in rows[2]


def test_a_family_that_is_whole_has_a_mean_of_its_own_below_the_mean_of_all(study, make_record):
    three = BUDGET.replace("[svamp, gsm8k]", "[svamp, gsm8k, sst2]")
    shares = {"svamp": 0.5, "gsm8k": 0.7, "sst2": 0.9}
    (pivot,) = pivots(study(three, lambda axes: make_record(axes, accuracy=shares[axes["task"]])), ACCURACY)
    lines = {line.name: line.cells[("fcca",)].value for line in averages(pivot) if line.ranked}
    assert lines == pytest.approx({"Mean": 70, "Mean, math": 60})  # of the five of GLUE there is one


def test_a_run_that_measured_something_else_is_no_number_and_says_what_it_lacks(study, make_record):
    def record(axes):
        made = make_record(axes, accuracy=0.5)
        if (axes["task"], axes["method"], axes["seed"]) == ("svamp", "rawgrad", 43):
            del made["accuracy"]
        return made

    sheet = sheet_of(study(BUDGET, record))
    assert sheet.rows[0][2].text == "n/a 2/3"
    assert "seed 43: the record has no accuracy" in sheet.rows[0][2].hint
    assert sheet.foot[0][2].text == "n/a"
