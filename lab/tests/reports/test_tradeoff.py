"""Accuracy beside trained values, against the paper's table "efficiency-state"."""

from __future__ import annotations

from frozencore_lab.reports.comparison import read_task_means
from frozencore_lab.reports.labels import TASKS
from frozencore_lab.reports.report import study_section
from places import PAPER_TABLES

STUDY = f"""
  trainable-basis:
    title: Trainable bases
    axes: {{model: [small], task: [{", ".join(TASKS)}], method: [fcca, lora, dora, pissa], seed: [42]}}
    report: {{rows: [task], columns: [method], reference: fcca, figure: state}}
"""


def test_the_table_is_the_papers(study, make_record):
    columns = read_task_means(PAPER_TABLES / "paper_trainable_q3.csv").columns
    printed = {name.casefold(): cells for name, cells in columns.items()}

    def record(axes):
        return make_record(axes, accuracy=printed[axes["method"]][TASKS[axes["task"]]] / 100)

    section = study_section(study(STUDY, record))
    (sheet,) = (table.sheet for table in section.main if table.sheet.name == "trainable-basis-tradeoff")
    assert sheet.headings == ("method", "mean", "values", "Δ vs. FCCA")
    assert [[cell.text for cell in line] for line in sheet.rows] == [
        ["FCCA", "83.0", "36,864", "reference"],
        ["LoRA", "83.3", "7,372,800", "+0.32"],
        ["DoRA", "83.2", "7,538,688", "+0.23"],
        ["PiSSA", "80.4", "7,372,800", "-2.60"],
    ]


def test_an_average_that_lacks_a_run_has_no_distance(study, make_record):
    def record(axes):
        return None if axes["method"] == "lora" and axes["task"] == "rte" else make_record(axes)

    section = study_section(study(STUDY, record))
    (sheet,) = (table.sheet for table in section.main if table.sheet.name == "trainable-basis-tradeoff")
    assert [cell.text for cell in sheet.rows[1]][1:] == ["n/a", "7,372,800", "n/a"]
    assert "RTE" in sheet.rows[1][3].hint
