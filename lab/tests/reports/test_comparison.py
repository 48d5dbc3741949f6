"""Comparisons and statistics against the paper's tables, against SciPy, and against counting by hand."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from fixtures import PAPER_TABLES
from frozencore.errors import DataError
from frozencore_lab.reports.comparison import TaskTable, analyse, comparison_view, family_sheet, read_task_means
from frozencore_lab.reports.statistics import (
    REAL_COVERAGE,
    Scored,
    adjusted,
    bootstrap_interval,
    differences,
    holm,
    mean,
    mean_ranks,
    paired_difference,
    paired_t,
    signed_rank,
    wins_ties_losses,
)

PAPER = PAPER_TABLES


def paper(name: str) -> TaskTable:
    return read_task_means(PAPER / f"paper_{name}.csv")


def test_the_3b_table_gives_the_papers_wins_and_exact_wilcoxon_p():
    pairs = analyse(paper("q3"), "FCCA").pairs
    assert [pair.other for pair in pairs] == ["RawGrad", "FiLoRA", "MiLoRA", "LoRA-XS", "VeRA", "EVA", "Random"]
    assert [pair.wins for pair in pairs] == [11, 10, 10, 10, 9, 9, 11]
    assert [f"{pair.wilcoxon_p:.4f}"[1:] for pair in pairs] == [
        ".0010", ".0020", ".0020", ".0020", ".0137", ".0098", ".0010",
    ]  # fmt: skip
    assert all(pair.wins + pair.ties + pair.losses == 11 for pair in pairs)


def test_the_3b_table_gives_the_papers_mean_differences_and_t_tests():
    pairs = {pair.other: pair for pair in analyse(paper("q3"), "FCCA").pairs}
    printed = {
        "RawGrad": 4.78,
        "FiLoRA": 3.51,
        "MiLoRA": 2.57,
        "LoRA-XS": 2.31,
        "VeRA": 2.74,
        "EVA": 3.09,
        "Random": 3.28,
    }
    for name, value in printed.items():  # the paper's are of unrounded means, ours of displayed ones
        assert pairs[name].mean_difference == pytest.approx(value, abs=0.03)
        assert pairs[name].interval[0] < value < pairs[name].interval[1]
    for name, p in {"RawGrad": 0.015, "FiLoRA": 0.016, "MiLoRA": 0.005, "VeRA": 0.015, "EVA": 0.090}.items():
        assert pairs[name].t_p == pytest.approx(p, abs=0.0015)


def test_the_four_models_give_the_papers_macro_averages():
    printed = {
        "q15": [77.2, 75.3, 75.2, 74.9, 74.8, 74.8, 76.7, 73.8],
        "q3": [83.0, 78.3, 79.5, 80.4, 80.7, 80.3, 79.9, 79.7],
        "q7": [87.5, 86.0, 85.5, 84.3, 84.9, 85.7, 86.7, 82.9],
        "llama1": [68.1, 66.3, 67.5, 64.7, 66.6, 66.4, 68.2, 63.1],
    }
    for name, means in printed.items():
        found = list(analyse(paper(name), "FCCA").means.values())
        assert found == pytest.approx(means, abs=0.0501)


def test_fcca_against_rawgrad_wins_38_of_44_ties_one_and_loses_five():
    counts = [analyse(paper(name), "FCCA").pairs[0] for name in ("q15", "q3", "q7", "llama1")]
    assert [sum(values) for values in zip(*((c.wins, c.ties, c.losses) for c in counts), strict=True)] == [38, 1, 5]


def test_family_means_are_the_papers():
    families = analyse(paper("q3"), "FCCA").family_means
    assert list(families["FCCA"].values()) == pytest.approx([73.9, 89.6, 79.4], abs=0.0501)
    gain = families["FCCA"]["reasoning/QA"] - families["RawGrad"]["reasoning/QA"]
    assert gain == pytest.approx(9.5, abs=0.05)


def test_lora_is_ahead_by_what_the_paper_says_and_loses_on_four_tasks():
    pairs = {pair.other: pair for pair in analyse(paper("trainable_q3"), "FCCA").pairs}
    assert pairs["LoRA"].mean_difference == pytest.approx(-0.318, abs=0.001)
    assert pairs["DoRA"].mean_difference == pytest.approx(-0.227, abs=0.001)
    assert (pairs["LoRA"].wins, pairs["DoRA"].wins) == (4, 5)


def test_lower_is_better_turns_wins_and_differences_around():
    table = TaskTable(("x", "y"), {"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0, "y": 3.0}})
    pair = analyse(table, "a", lower_is_better=True).pairs[0]
    assert (pair.mean_difference, pair.wins, pair.losses) == (1.5, 2, 0)
    assert wins_ties_losses(differences([1.0], [3.0])) == (0, 0, 1)


def test_a_comparison_goes_to_json_and_to_the_screen():
    comparison = analyse(paper("q3"), "FCCA")
    back = json.loads(json.dumps(asdict(comparison), allow_nan=False))
    assert back["pairs"][0]["wins"] == 11
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_view(comparison))
    shown = console.export_text()
    assert ".0137" in shown
    assert "reasoning/QA" in shown
    assert "…" not in shown


def test_a_spreadsheets_byte_order_mark_and_blank_lines_are_read_over(tmp_path):
    (tmp_path / "table.csv").write_bytes("﻿task, a, b\r\n\r\nx, 1, .5\r\ny,-2,3e1\r\n".encode())
    assert read_task_means(tmp_path / "table.csv") == TaskTable(
        ("x", "y"), {"a": {"x": 1.0, "y": -2.0}, "b": {"x": 0.5, "y": 30.0}}
    )


def test_tasks_that_are_not_the_papers_have_no_families_to_show():
    own = analyse(TaskTable(("x", "y"), {"a": {"x": 51.0, "y": 62.0}, "b": {"x": 53.0, "y": 63.0}}), "a")
    assert family_sheet(own) is None
    assert family_sheet(analyse(paper("q3"), "FCCA")).headings[1:] == ("math", "GLUE", "reasoning/QA")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_view(own))
    shown = console.export_text()
    assert "56.50" in shown
    assert "families" not in shown


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=10))
def test_wilcoxon_with_ties_and_zeros_counts_every_assignment_of_signs(values):
    nonzero = [abs(value) for value in values if value]
    observed = _rank_sum_distance(nonzero, [value > 0 for value in values if value])
    signs = list(itertools.product((False, True), repeat=len(nonzero)))
    as_far = sum(_rank_sum_distance(nonzero, list(sign)) >= observed for sign in signs)
    assert signed_rank([float(value) for value in values]) == pytest.approx(as_far / len(signs))


def _rank_sum_distance(sizes, positive):
    """The distance of the positive rank sum from its mean, in quarters of a rank."""
    ranks = [sum(2 for other in sizes if other < size) + sizes.count(size) + 1 for size in sizes]  # doubled
    return abs(2 * sum(rank for rank, plus in zip(ranks, positive, strict=True) if plus) - sum(ranks))


def test_differences_that_are_equal_in_print_are_ties():
    gains = differences([95.1, 85.9, 88.9, 0.0], [94.8, 85.6, 88.9, 0.0])
    assert gains == [0.3, 0.3, 0.0, 0.0]
    assert wins_ties_losses(gains) == (2, 2, 0)
    assert signed_rank([1.0, -1.0]) == 1.0


def test_wilcoxon_of_many_tasks_without_ties_is_scipys_exact_test():
    drawn = np.random.default_rng(0).normal(0.1, size=150).tolist()
    assert signed_rank(drawn) == pytest.approx(stats.wilcoxon(drawn, method="exact").pvalue)


def test_paired_t_is_scipys():
    x, y = [79.7, 68.1, 95.1, 88.9], [74.9, 66.7, 93.6, 86.9]
    assert paired_t(differences(x, y)) == pytest.approx(stats.ttest_rel(x, y).pvalue)


def test_holm_is_the_textbooks_example():
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert holm([0.01, math.nan, 0.02, 0.3]) == pytest.approx([0.03, None, 0.04, 0.3])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_order_and_lies_between_the_p_and_bonferroni(p_values):
    adjusted = [value for value in holm(p_values) if value is not None]
    by_p = [value for _, value in sorted(zip(p_values, adjusted, strict=True))]
    assert by_p == sorted(by_p)
    assert all(p <= q <= min(1.0, len(p_values) * p) for p, q in zip(p_values, adjusted, strict=True))


def test_the_bootstrap_interval_is_seeded_and_near_scipys():
    gains = [4.8, 1.4, 1.5, 2.0, 1.2, 1.8, 1.7, 1.8, 10.0, 7.4, 18.8]
    low, high = bootstrap_interval(gains)
    assert bootstrap_interval(gains) == (low, high)
    theirs = stats.bootstrap((gains,), np.mean, method="percentile", random_state=1).confidence_interval
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.15)


def test_ranks_share_ties_and_turn_where_lower_is_better():
    columns = {"a": [3.0, 2.0], "b": [3.0, 1.0], "c": [1.0, 0.0]}
    assert mean_ranks(columns) == {"a": 1.25, "b": 1.75, "c": 3.0}
    assert mean_ranks(columns, lower_is_better=True) == {"a": 2.75, "b": 2.25, "c": 1.0}


def test_means_that_are_equal_in_print_share_a_rank_and_have_no_p() -> None:
    by_task = {"a": [0.1 + 0.2, 0.5], "b": [0.3, 0.5]}
    assert mean_ranks(by_task) == {"a": 1.5, "b": 1.5}
    runs, others = ([Scored(100 * x) for x in values] for values in ((0.57, 0.58, 0.60), (0.56, 0.57, 0.59)))
    assert paired_difference(runs, others).p is None


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_a_cell_without_a_number_is_named_and_never_averaged(bad):
    with pytest.raises(DataError, match="fcca on svamp"):
        mean({"fcca on gsm8k": 60.0, "fcca on svamp": bad})


@pytest.mark.parametrize("num_tasks", [3, 4, 11])
def test_the_interval_of_few_tasks_holds_the_mean_as_often_as_the_report_says(num_tasks: int) -> None:
    drawn = np.random.default_rng(0)
    held = 0
    for _ in range(1500):
        own = drawn.normal(size=num_tasks)
        means = own[drawn.integers(0, num_tasks, (400, num_tasks))].mean(1)
        low, high = np.quantile(means, [0.025, 0.975])
        held += bool(low <= 0 <= high)
    assert held / 1500 == pytest.approx(REAL_COVERAGE[num_tasks], abs=0.03)


def drawn_runs(draw, seeds, rows, pool, *, seed_sd):
    """Runs of two methods whose true difference is 0: effects of seeds, of rows (shared), and of seeds on rows."""
    of_row, runs, others = draw.normal(size=pool), [], []
    for _ in range(seeds):
        own = draw.choice(pool, rows, replace=False) if pool > rows else np.arange(rows)
        tokens, nats = draw.integers(1, 6, rows), draw.normal(3, 1, rows)
        apart = of_row[own] + draw.normal(size=rows) + draw.normal(0, seed_sd)
        for found, by_row in ((runs, nats + apart), (others, nats)):
            sums = (by_row * tokens).tolist()
            found.append(Scored(math.fsum(sums) / int(tokens.sum()), own.tolist(), sums, tokens.tolist()))
    return runs, others


@pytest.mark.parametrize(
    ("seeds", "pool", "seed_sd"), [(1, 50, 0.0), (3, 50, 0.1), (3, 10_000, 0.0), (10, 50, 0.1), (10, 90, 0.3)]
)
def test_the_interval_over_seeds_and_rows_holds_the_true_difference(seeds, pool, seed_sd):
    draw = np.random.default_rng(0)
    found = [paired_difference(*drawn_runs(draw, seeds, 50, pool, seed_sd=seed_sd), draws=100) for _ in range(200)]
    held = sum(abs(one.mean) <= one.half for one in found) / len(found)
    assert 0.89 <= held <= 0.99
    assert held == sum(one.p >= 0.05 for one in found) / len(found)


def test_shared_rows_widen_the_interval_and_scores_alone_give_students_t():
    runs, others = drawn_runs(np.random.default_rng(0), 5, 50, 50, seed_sd=0.0)
    counted = paired_difference(runs, others)
    alone = paired_difference([Scored(run.value) for run in runs], others)
    assert (counted.over, alone.over) == ("seeds and rows", "seeds")
    assert counted.half > 1.5 * alone.half
    theirs = stats.ttest_rel([run.value for run in runs], [run.value for run in others])
    assert alone.p == pytest.approx(theirs.pvalue)
    assert alone.mean + alone.half == pytest.approx(theirs.confidence_interval(0.95).high)
    assert adjusted([counted, alone])[1].holm == min(holm([counted.p, alone.p])[1], 1.0)


def test_what_nothing_repeats_or_is_all_equal_has_no_p():
    assert paired_difference([Scored(1.0)], [Scored(0.5)]).half is None
    same = Scored(0.5, [1, 2], [0, 1], [1, 1])
    assert (paired_difference([same] * 2, [same] * 2).half, paired_difference([same] * 2, [same] * 2).p) == (0.0, None)
