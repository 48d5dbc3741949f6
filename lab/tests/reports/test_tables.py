"""The tables of a study: what is averaged, compared and marked, and what never is; several against the paper's."""

from __future__ import annotations

import io
from statistics import mean, stdev

import pytest
from rich.console import Console
from rich.text import Text

from fixtures import PAPER_TABLES
from frozencore_lab.reports.comparison import compare, differences_sheet, read_task_means
from frozencore_lab.reports.pivot import ACCURACY, COSINES, LOSS, averages, means_csv, measures_of, pivots, runs_csv
from frozencore_lab.reports.report import study_section
from frozencore_lab.reports.sheet import (
    TASKS,
    Sheet,
    SheetCell,
    column_label,
    label,
    latex,
    markdown,
    rich_table,
    transposed,
)
from frozencore_lab.reports.tables import counted_values, pivot_sheet, tradeoff_sheet
from small_runs import SCORE, record_content, stability_content

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
THREE = BUDGET.replace("[svamp, gsm8k]", "[svamp, gsm8k, sst2]")
SCORES = {
    ("svamp", "fcca"): [0.797, 0.812, 0.782], ("svamp", "rawgrad"): [0.749, 0.769, 0.729],
    ("gsm8k", "fcca"): [0.681, 0.689, 0.673], ("gsm8k", "rawgrad"): [0.6814, 0.6817, 0.6811],
}  # fmt: skip
NAN = {"reason": "diverged", "message": "the loss is nan"}


@pytest.fixture
def budget(study):
    """The study of ``SCORES``; ``instead`` replaces the outcome of a (task, method, seed)."""

    def make(instead=None, yaml=BUDGET):
        def record(axes):
            key = axes["task"], axes["method"]
            if (*key, axes["seed"]) in (instead or {}):
                return instead[*key, axes["seed"]]
            accuracy = SCORES.get(key, [0.5] * 3)[axes["seed"] - 42]
            return record_content(axes, accuracy=accuracy, held_out_loss=3 - accuracy, accuracy_before=0.99)

        return study(yaml, record)

    return make


def sheet_of(results, measure=ACCURACY):
    (pivot,) = pivots(results, measure)
    return pivot_sheet(pivot, "t")


def texts(line):
    return [f"{cell.text}±{cell.spread}" if cell.spread else cell.text for cell in line]


def test_a_cell_is_the_mean_and_sample_deviation_and_the_best_printed_means_are_marked(budget):
    sheet, first = sheet_of(budget()), SCORES["svamp", "fcca"]
    assert texts(sheet.rows[0]) == [
        "SVAMP", f"{100 * mean(first):.1f}±{100 * stdev(first):.1f}", "74.9±2.0", "99.0"
    ]  # fmt: skip
    assert sheet.headings[-1] == "base model"  # which is never the best
    assert [[cell.best for cell in line[1:]] for line in sheet.rows] == [[True, False, False], [True, True, False]]
    assert [cell.best for cell in sheet_of(budget(), LOSS).rows[0][1:3]] == [True, False]  # the lower loss is better


def test_the_macro_average_is_over_unrounded_means(budget):
    (pivot,) = pivots(budget(), ACCURACY)
    line, _ = averages(pivot)
    fcca = line.cells[("fcca",)]
    assert fcca.value == pytest.approx(100 * (mean(SCORES["svamp", "fcca"]) + mean(SCORES["gsm8k", "fcca"])) / 2)
    by_seed = [mean(pair) for pair in zip(SCORES["svamp", "fcca"], SCORES["gsm8k", "fcca"], strict=True)]
    assert fcca.std == pytest.approx(100 * stdev(by_seed))


def test_below_stand_the_mean_of_a_whole_family_and_the_median_deviation_which_is_never_best(study):
    spreads = {"svamp": 1.0, "gsm8k": 2.0, "sst2": 6.0}  # of three seeds at -s, 0, +s the sample deviation is s
    shares = {"svamp": 0.5, "gsm8k": 0.7, "sst2": 0.9}

    def record(axes):
        return record_content(axes, accuracy=shares[axes["task"]] + spreads[axes["task"]] / 100 * (axes["seed"] - 43))

    foot = {line[0].text: line[1] for line in sheet_of(study(THREE, record)).foot}
    assert {name: cell.text for name, cell in foot.items()} == {
        "Mean": "70.0",
        "Mean, math": "60.0",
        "Median std": "2.0",
    }
    assert (foot["Mean"].best, foot["Median std"].best) == (True, False)
    single = sheet_of(study(THREE.replace("[42, 43, 44]", "[42]"), record))
    assert "Median std" not in [line[0].text for line in single.foot]


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        (None, "- 2/3"),
        (NAN, "div. 2/3"),
        ({"reason": "out of memory", "message": "too large"}, "failed 2/3"),
        ("no accuracy", "n/a 2/3"),
    ],
)
def test_a_cell_that_lacks_a_seed_is_not_averaged_nor_is_its_column(budget, outcome, shown):
    if outcome == "no accuracy":
        outcome = record_content({"task": "svamp", "method": "rawgrad", "seed": 43}, accuracy=...)
    results = budget({("svamp", "rawgrad", 43): outcome})
    sheet = sheet_of(results)
    assert (sheet.rows[0][2].text, sheet.rows[0][2].value) == (shown, None)
    assert [line[2].text for line in sheet.foot] == ["n/a", "n/a"]
    assert sheet.foot[0][2].hint == "no average without RawGrad on SVAMP"
    assert "no average without RawGrad on SVAMP" in markdown(sheet)
    assert means_csv(pivots(results, ACCURACY)[0]).splitlines()[1].endswith(",")


def test_a_loss_that_is_not_finite_is_diverged_and_never_a_number(study):
    results = study(BUDGET, lambda axes: record_content(axes, held_out_loss=None if axes["method"] == "fcca" else 1.0))
    assert [cell.text for cell in sheet_of(results, LOSS).rows[0][1:3]] == ["div.", "1.000"]


def test_the_reference_is_compared_only_with_whole_columns_over_tasks_each_once(budget):
    with_eva = BUDGET.replace("[fcca, rawgrad]", "[fcca, rawgrad, eva]")
    none = {(task, "eva", seed): None for task in ("svamp", "gsm8k") for seed in (42, 43, 44)}
    comparison, note = compare(pivots(budget(none, with_eva), ACCURACY)[0])
    assert [pair.other for pair in comparison.pairs] == ["rawgrad"]
    assert note == "Left out, as runs are missing: EVA-core."
    lacks = budget({("svamp", "fcca", 42): None})
    assert compare(pivots(lacks, ACCURACY)[0]) == (None, "No comparison: FCCA lacks runs.")
    ranks = BUDGET.replace("method:", "rank: [8, 16]\n      method:").replace("rows: [task]", "rows: [task, rank]")
    comparison, note = compare(pivots(budget(yaml=ranks), ACCURACY)[0])
    assert comparison is None
    assert "several rows" in note


def test_further_axes_give_a_table_each_with_its_own_runs_trained_values(study):
    def record(axes):
        if (axes["method"], axes["model"]) == ("rawgrad", "small"):
            return None
        return record_content(axes, num_trainable=10 if axes["model"] == "small" else 20)

    small, large = pivots(study(BUDGET.replace("model: [small]", "model: [small, large]"), record), ACCURACY)
    assert (small.title, small.name) == ("Matched budget, small", "budget-small")
    assert counted_values(small) == {("fcca",): 10}
    assert counted_values(large) == {("fcca",): 20, ("rawgrad",): 20}


def test_module_lists_are_shown_short_and_tasks_in_columns_are_compared_down(study):
    yaml = """
  modules:
    title: Rank by modules
    axes: {model: [small], task: [svamp, gsm8k], rank: [8, 16], targets: [[q_proj, v_proj], null], seed: [42]}
    report: {rows: [rank, targets], columns: [task]}
"""
    sheet = sheet_of(
        study(yaml, lambda axes: record_content(axes, accuracy=axes["rank"] / 32 + (axes["task"] == "gsm8k") / 4))
    )
    assert sheet.headings == ("r", "modules", "SVAMP", "GSM8K", "Mean")
    assert texts(sheet.rows[0]) == ["8", "q/v", "25.0", "50.0", "37.5"]
    assert [[cell.best for cell in line[2:]] for line in sheet.rows] == [[False] * 3] * 2 + [[True] * 3] * 2
    assert sheet.rows[1][1].text == "default"


def test_tasks_as_columns_are_compared_as_tasks_as_rows_are(study):
    found = []
    for sides in ("rows: [task], columns: [method]", "rows: [method], columns: [task]"):
        yaml = f"""
  both-ways:
    title: Both ways
    axes: {{model: [small], task: [svamp, gsm8k], method: [fcca, lora], seed: [42, 43]}}
    report: {{{sides}, reference: fcca}}
"""
        (pivot,) = pivots(
            study(
                yaml,
                lambda axes: record_content(axes, accuracy=0.5 + 0.1 * (axes["method"] == "fcca") + axes["seed"] / 1e3),
            ),
            ACCURACY,
        )
        tradeoff = tradeoff_sheet(pivot, "tradeoff")
        found.append((compare(pivot), differences_sheet(pivot, "d"), [texts(line) for line in tradeoff.rows]))
    assert found[0] == found[1]
    assert found[0][0][0] is not None


def test_plain_text_tasks_have_no_accuracy_table_but_a_loss(study):
    def record(axes):
        without = ("accuracy", "accuracy_before", "score") if axes["task"] == "gsm8k" else ()
        return record_content(axes, **dict.fromkeys(without, ...))

    mixed = study(BUDGET, record)
    assert measures_of(mixed) == (ACCURACY, LOSS)
    assert pivots(mixed, ACCURACY)[0].rows == (("svamp",),)
    assert pivots(mixed, LOSS)[0].rows == (("svamp",), ("gsm8k",))
    assert measures_of(study(BUDGET.replace("[svamp, gsm8k]", "[gsm8k]"), record)) == (LOSS,)


def test_a_stability_study_shows_its_cosines_and_marks_none_as_best(study):
    yaml = """
  stability:
    title: Basis stability
    kind: stability
    reference_size: 512
    axes: {model: [small], task: [svamp], calibration_size: [128, 512], seed: [42, 43]}
    report: {rows: [task], columns: [calibration_size]}
"""
    results = study(yaml, lambda axes: stability_content(axes, axes["calibration_size"] / 512))
    assert measures_of(results) == COSINES
    sheet = sheet_of(results, COSINES[0])
    assert texts(sheet.rows[0]) == ["SVAMP", "0.250±0.000", "1.000±0.000"]
    assert not any(cell.best for cell in sheet.rows[0])


# ------------------------------------------------------------------------------------------------------- differences

MISMATCH = {"svamp": 79.7, "gsm8k": 78.0, "arc_challenge": 74.6, "sst2": 72.6}
SIDES = {
    "svamp": (73.4, 76.7, 76.7, 79.7), "arc_challenge": (74.7, 83.2, 80.7, 83.1), "sst2": (92.4, 95.1, 94.8, 95.1),
    "rte": (71.7, 89.3, 88.4, 88.2), "mrpc": (80.4, 88.4, 87.3, 88.4), "winogrande": (55.6, 70.6, 68.1, 72.8),
}  # fmt: skip
"""The printed means of the paper's tables "whitening-full" and "side-svamp"; above, of "mismatch"."""
WHITEN = "whiten: [none, input, output, both]"


@pytest.fixture
def compared(study):
    def make(tasks, axis, report, accuracy, measure=ACCURACY):
        def record(axes):
            found = accuracy(axes)
            return None if found is None else record_content(axes, accuracy=found / 100, held_out_loss=1 - found / 100)

        axes = f"{{model: [small], task: [{', '.join(tasks)}], {axis}, seed: [42, 43]}}"
        yaml = f"  sides:\n    title: T\n    axes: {axes}\n    report: {{{report}}}\n"
        return sheet_of(study(yaml, record), measure)

    return make


def side(axes):
    return SIDES[axes["task"]][("none", "input", "output", "both").index(axes["whiten"])]


def test_both_less_none_is_a_column_with_the_papers_numbers(compared):
    report = "rows: [task], columns: [whiten], reference: none, differences: [both]"
    found = compared(SIDES, WHITEN, report, side)
    assert found.headings[4:6] == ("Both", "Both − None")
    assert [line[5].text for line in found.rows] == ["+6.3", "+8.4", "+2.7", "+16.5", "+8.0", "+17.2"]
    assert found.rows[3][5].value == 16.5  # what ties in print ties here
    losses = compared(["svamp", "rte"], WHITEN, report, side, LOSS)
    assert [line[5].text for line in losses.rows] == ["-0.063", "-0.165"]  # the same sign where lower is better
    own = compared(
        ["svamp"], WHITEN, report, lambda axes: side(axes) + (axes["seed"] - 42) * (axes["whiten"] == "both")
    )
    assert own.rows[0][5].hint == "seed 42: +6.3; seed 43: +7.3"
    lacks = compared(["svamp"], WHITEN, report, lambda axes: None if axes["whiten"] == "none" else side(axes))
    assert (lacks.rows[0][5].text, lacks.rows[0][5].hint) == ("n/a", "a mean is missing")


def test_a_single_task_has_its_differences_below_where_none_are_asked_for(compared):
    found = compared(["svamp"], WHITEN, "rows: [task], columns: [whiten], reference: none", side)
    assert texts(found.foot[-1][:5]) == ["Δ from None", "0.0 (ref.)", "+3.3", "+3.3", "+6.3"]
    assert "less the reference's" in found.note


def test_where_the_tasks_are_columns_the_differences_are_the_papers_column(compared):
    report = "rows: [calibration_task], columns: [task], reference: matched"
    found = compared(
        ["svamp"], f"calibration_task: [{', '.join(MISMATCH)}]", report, lambda axes: MISMATCH[axes["calibration_task"]]
    )
    assert found.headings == ("calibrated on", "SVAMP", "Δ from matched")
    assert [tuple(cell.text for cell in line) for line in found.rows] == [
        ("SVAMP", "79.7", "0.0 (ref.)"), ("GSM8K", "78.0", "-1.7"), ("ARC-C", "74.6", "-5.1"), ("SST-2", "72.6", "-7.1")
    ]  # fmt: skip


def test_matched_is_another_row_for_each_task(compared):
    found = compared(
        ["svamp", "gsm8k"], "calibration_task: [svamp, gsm8k]",
        "rows: [calibration_task], columns: [task], reference: matched, mean: false",
        lambda axes: 80 if axes["task"] == axes["calibration_task"] else 70 - (axes["task"] == "gsm8k"),
    )  # fmt: skip
    assert found.headings[3:] == ("SVAMP: Δ", "GSM8K: Δ")
    assert [texts(line[3:]) for line in found.rows] == [["0.0 (ref.)", "-11.0"], ["-10.0", "0.0 (ref.)"]]


# --------------------------------------------------------------------------------------------------- runs that diverged

RATES = """
  no-qr-rates:
    title: No QR
    fixed: {coordinates: raw}
    axes: {model: [small], task: [svamp, arc_challenge, gsm8k], learning_rate: [5e-3, 2e-3, 1e-3, 5e-4], seed: [42, 43]}
    report: {rows: [task], columns: [learning_rate], mean: false, best: true, diverged_as_zero: true}
"""


@pytest.fixture
def swept(study):
    """The paper's sweep "noqr-lr-sweep": only ARC-C trains, at chance; ``others`` replaces outcomes."""

    def make(others=None, yaml=RATES):
        def record(axes):
            key = axes["task"], axes["learning_rate"], axes["seed"]
            if key in (others or {}):
                return others[key]
            if axes["task"] != "arc_challenge":
                return NAN
            accuracy = {5e-3: 0.2, 2e-3: 0.227, 1e-3: 0.21, 5e-4: 0.22}[axes["learning_rate"]]
            return record_content(axes, accuracy=accuracy, score={**SCORE, "standard_error": 0.0187, "chance": 0.25})

        return study(yaml, record)

    return make


def best(results):
    (table,) = (one for one in study_section(results).main if one.sheet.name == "no-qr-rates-best")
    return [texts(line)[1:] for line in table.sheet.rows]


def test_the_best_of_the_sweep_and_its_outcome_are_the_papers(swept):
    svamp, arc, gsm8k = best(swept())
    assert svamp == gsm8k == ["0.0†±0.0", "lr 0.005", "all 8 runs diverged"]
    assert arc[1:] == ["lr 0.002", "no better than chance (25 %)"]
    axes = {"task": "arc_challenge", "seed": 42}
    good = record_content(axes, accuracy=0.6, score={**SCORE, "chance": 0.25})
    found = best(swept({("arc_challenge", 5e-4, seed): good for seed in (42, 43)}))
    assert found[1] == ["60.0±0.0", "lr 0.0005", "all runs trained"]
    failed = {"reason": "out of memory", "message": "too large"}
    others = {("svamp", rate, 42): failed for rate in (5e-3, 2e-3)} | {("svamp", 1e-3, 43): None}
    assert best(swept(others))[0][1:] == [
        "lr 0.0005", "5 of 8 runs diverged; 2 of 8 runs failed; 1 of 8 runs missing"
    ]  # fmt: skip


def test_a_run_that_diverged_counts_as_0_where_the_study_asks_for_it_is_marked_and_never_best(swept):
    fine = record_content({"task": "svamp", "seed": 43}, accuracy=0.5)
    (pivot,) = pivots(swept({("svamp", 5e-3, 43): fine}), ACCURACY)
    sheet = pivot_sheet(pivot, "t")
    assert texts(sheet.rows[0][1:5])[0] == "25.0†±35.4"
    cell = sheet.rows[2][1]
    assert (cell.text, cell.spread, cell.value) == ("0.0†", "0.0", 0.0)
    assert cell.hint == "seed 42: 0.0 (diverged: the loss is nan); seed 43: 0.0 (diverged: the loss is nan)"
    assert "† 15 of 24 runs diverged and count as 0.0." in sheet.note
    assert not any(cell.best for cell in sheet.rows[2])
    assert r"0.0$^\dagger$" in latex(sheet)
    assert "svamp,0.005,42,0.0,diverged," in runs_csv(pivot)
    plain = swept(yaml=RATES.replace(", diverged_as_zero: true", ""))
    for results, measure in ((swept(), LOSS), (plain, ACCURACY)):
        assert texts(sheet_of(results, measure).rows[0][1:5]) == ["div."] * 4
    died = {"reason": "worker died", "message": "gone"}
    assert sheet_of(swept({("svamp", 5e-3, seed): died for seed in (42, 43)})).rows[0][1].text == "failed"


# ------------------------------------------------------------------------------------------------ trained values, forms


def test_accuracy_beside_trained_values_is_the_papers_table_of_state(study):
    yaml = f"""
  trainable-basis:
    title: Trainable bases
    axes: {{model: [small], task: [{", ".join(TASKS)}], method: [fcca, lora, dora, pissa], seed: [42]}}
    report: {{rows: [task], columns: [method], reference: fcca, figure: state}}
"""
    columns = read_task_means(PAPER_TABLES / "paper_trainable_q3.csv").columns
    printed = {name.casefold(): cells for name, cells in columns.items()}

    def tradeoff(lacking=()):
        def record(axes):
            if (axes["method"], axes["task"]) in lacking:
                return None
            return record_content(axes, accuracy=printed[axes["method"]][TASKS[axes["task"]]] / 100)

        return next(t.sheet for t in study_section(study(yaml, record)).main if t.sheet.name.endswith("-tradeoff"))

    sheet = tradeoff()
    assert sheet.headings == ("method", "mean", "values", "Δ vs. FCCA")
    assert [texts(line) for line in sheet.rows] == [
        ["FCCA", "83.0", "36,864", "reference"],
        ["LoRA", "83.3", "7,372,800", "+0.32"],
        ["DoRA", "83.2", "7,538,688", "+0.23"],
        ["PiSSA", "80.4", "7,372,800", "-2.60"],
    ]
    lacks = tradeoff(lacking=[("lora", "rte")]).rows[1]
    assert texts(lacks)[1:] == ["n/a", "7,372,800", "n/a"]
    assert "RTE" in lacks[3].hint


def test_the_csv_of_means_is_a_table_that_the_comparison_reads(budget, tmp_path):
    (pivot,) = pivots(budget(), ACCURACY)
    (tmp_path / "means.csv").write_text(means_csv(pivot))
    table = read_task_means(tmp_path / "means.csv")
    assert list(table.columns) == ["fcca", "rawgrad"]
    assert table.columns["fcca"]["svamp"] == pivot.cells[("svamp",), ("fcca",)].mean
    lines = runs_csv(pivot).splitlines()
    assert lines[0] == "task,method,seed,accuracy,status,run,message"
    assert len(lines) == 1 + 2 * 2 * 3


def test_latex_and_markdown_are_escaped_and_keep_their_columns(budget):
    text = latex(sheet_of(budget(yaml=BUDGET.replace("Matched budget", '"50 % of a_b & $c #1 ~{x}^2"'))))
    assert r"50 \% of a\_b \& \$c \#1 \textasciitilde{}\{x\}\textasciicircum{}2" in text
    assert r"SVAMP & \textbf{79.7{\scriptsize$\pm$1.5}} & 74.9{\scriptsize$\pm$2.0}" in text
    assert text.count(r"\midrule") == 2
    assert text.count("{") - text.count("}") == text.count(r"\{") - text.count(r"\}") == 0
    text = markdown(sheet_of(budget(yaml=BUDGET.replace("Matched budget", '"a | b *c* <d>"'))))
    assert r"**a \| b \*c\* \<d\>: accuracy, %**" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in rows} == {5}
    assert "| **79.7 ± 1.5** |" in rows[2]


def test_on_a_screen_the_best_is_bold_averages_stand_below_and_a_narrow_one_has_tasks_as_columns() -> None:
    rows = ((label("a"), SheetCell("79.7", "1.5", best=True)), (label("b"), SheetCell("68.1")))
    sheet = Sheet("t", "A title", "", ("task", "FCCA"), rows, foot=((label("Mean"), SheetCell("73.9")),))
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(rich_table(sheet))
    text = Text.from_ansi(console.file.getvalue())  # type: ignore[attr-defined]
    assert text.plain.index("79.7 ± 1.5") < text.plain.index("68.1") < text.plain.index("73.9")
    bold = "".join(text.plain[span.start : span.end] for span in text.spans if "bold" in str(span.style))
    assert [word in bold for word in ("79.7 ± 1.5", "68.1", "73.9")] == [True, False, False]
    turned = transposed(sheet)
    assert turned.headings == ("", "a", "b", "Mean")
    assert [texts(row) for row in turned.rows] == [["FCCA", "79.7±1.5", "68.1", "73.9"]]


def test_a_variant_is_called_by_the_label_of_its_method() -> None:
    assert [column_label(name) for name in ("eva", "lora-r1", "lora")] == ["EVA-core", "LoRA r1", "LoRA"]
