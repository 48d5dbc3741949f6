"""Several campaigns in one report, made of what the paper prints: its cross-scale table must come out again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib import pyplot as plt

from frozencore.errors import ArtifactError, ConfigError
from frozencore.tune.methods import method_name
from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.reports.across import across_document
from frozencore_lab.reports.labels import TASKS
from frozencore_lab.reports.sheet import latex, markdown
from frozencore_lab.reports.tables.comparison import read_task_means
from frozencore_lab.reports.writing import write_document
from places import PAPER_TABLES

MODELS = {"q15": "Qwen2.5-1.5B", "q3": "Qwen2.5-3B", "q7": "Qwen2.5-7B", "llama1": "Llama-3.2-1B"}
BY_PRINT = {"RawGrad": "rawgrad", "FiLoRA": "filora", "MiLoRA": "milora", "LoRA-XS": "lora_xs"}
BY_PRINT |= {"FCCA": "fcca", "VeRA": "vera", "EVA": "eva", "Random": "random"}
STUDY = """
  matched-budget:
    title: Matched-budget comparison
    axes: {model: [MODEL], task: [TASKS], method: [METHODS], seed: [42]}
    report: {rows: [task], columns: [method], reference: fcca, figure: ranking}
"""


@pytest.fixture(scope="module")
def paper(tmp_path_factory, made_runs, make_record):
    """A campaign whose task means are a table of the paper's."""
    from frozencore_lab.campaign.spec import read_campaign

    def make(name: str, model: str, *, tasks: int = 11, campaign: str = "") -> CampaignResults:
        table = read_task_means(PAPER_TABLES / f"paper_{name}.csv")
        by_method = {BY_PRINT[column]: cells for column, cells in table.columns.items()}
        printed = {task: TASKS[task] for task in TASKS}
        file = tmp_path_factory.mktemp(name) / "campaign.yaml"
        study = STUDY.replace("MODEL", model.lower()).replace("METHODS", ", ".join(by_method))
        study = study.replace("TASKS", ", ".join(list(printed)[:tasks]))
        file.write_text(f"name: {campaign or name}\nmodels: {{{model.lower()}: some/{model}}}\nstudies:\n{study}")
        made = read_campaign(file)

        def record(axes):
            accuracy = by_method[axes["method"]][printed[axes["task"]]] / 100
            return make_record(axes, accuracy=accuracy, held_out_loss=1 - accuracy)

        studies = (
            StudyResults(name, one, tuple(made_runs(name, one.axes, record)), ()) for name, one in made.studies.items()
        )
        return CampaignResults(made, tuple(studies))

    return make


@pytest.fixture(scope="module")
def four(paper):
    return [paper(name, model) for name, model in MODELS.items()]


def tables(document):
    return {table.sheet.name: table for section in document.sections for table in section.tables}


def test_the_means_the_best_and_the_second_best_are_those_of_the_papers_cross_scale_table(four):
    sheet = tables(across_document(four))["matched-budget-means"].sheet
    assert sheet.headings[1:] == tuple(
        method_name(BY_PRINT[name]) for name in read_task_means(PAPER_TABLES / "paper_q3.csv").columns
    )
    printed = {
        "qwen2.5-1.5b": "*77.2* 75.3 75.2 74.9 74.8 74.8 _76.7_ 73.8",
        "qwen2.5-3b": "*83.0* 78.3 79.5 80.4 _80.7_ 80.3 79.9 79.7",
        "qwen2.5-7b": "*87.5* 86.0 85.5 84.3 84.9 85.7 _86.7_ 82.9",
        "llama-3.2-1b": "_68.1_ 66.3 67.5 64.7 66.6 66.4 *68.2* 63.1",
    }
    marked = {
        line[0].text: " ".join(
            f"*{cell.text}*" if cell.best else f"_{cell.text}_" if cell.second else cell.text for cell in line[1:]
        )
        for line in sheet.rows
    }
    assert marked == printed


def test_the_reference_wins_38_of_44_against_rawgrad_ties_one_and_loses_five(four):
    sheet = tables(across_document(four))["matched-budget-wins"].sheet
    rows = {line[0].text: [cell.text for cell in line[1:]] for line in sheet.rows}
    assert rows["RawGrad"][:8] == ["9 / 0 / 2", "11 / 0 / 0", "10 / 1 / 0", "8 / 0 / 3", "38", "1", "5", "44"]
    assert rows["EVA-core"][3] == "6 / 0 / 5"
    columns = [read_task_means(PAPER_TABLES / f"paper_{name}.csv").columns for name in MODELS]
    gains = [own["FCCA"][task] - own["RawGrad"][task] for own in columns for task in own["FCCA"]]
    assert sheet.rows[0][-1].value == pytest.approx(sum(gains) / 44)
    assert len(rows) == 7


def test_where_lower_is_better_the_marks_and_the_wins_are_the_same(four):
    found = tables(across_document(four))
    marks = [[(cell.best, cell.second) for line in found[name].sheet.rows for cell in line] for name in (
        "matched-budget-means", "matched-budget-means-loss",
    )]  # fmt: skip
    assert marks[0] == marks[1]
    wins = [
        [cell.text for cell in found[name].sheet.rows[0][1:9]]
        for name in ("matched-budget-wins", "matched-budget-wins-loss")
    ]
    assert wins[0] == wins[1]


def test_the_second_best_is_underlined_in_every_format(four):
    sheet = tables(across_document(four))["matched-budget-means"].sheet
    assert "| qwen2.5-3b | **83.0** | 78.3 | 79.5 | 80.4 | <ins>80.7</ins> |" in markdown(sheet)
    assert r"qwen2.5-3b & \textbf{83.0} & 78.3 & 79.5 & 80.4 & \underline{80.7} &" in latex(sheet)


def test_the_figure_has_a_panel_a_model_each_in_an_order_of_its_own(four):
    (drawing, _) = across_document(four).sections[0].drawings
    figure = drawing.draw()
    orders = [[tick.get_text() for tick in axis.get_yticklabels()] for axis in figure.axes]
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    plt.close(figure)
    assert titles == [model.lower() for model in MODELS.values()]
    assert [order[-2:] for order in orders] == [
        ["EVA-core", "FCCA"], ["LoRA-XS-core", "FCCA"], ["EVA-core", "FCCA"], ["FCCA", "EVA-core"],
    ]  # fmt: skip


def test_it_is_written_like_any_report(four, tmp_path):
    names = {path.relative_to(tmp_path).as_posix() for path in write_document(across_document(four), tmp_path)}
    assert {"index.html", "report.md", "figures/matched-budget.png", "tables/matched-budget-wins.tex"} <= names
    page = (tmp_path / "index.html").read_text()
    assert "352 of 352 final runs done" in page
    assert 'class="second"' in page
    assert page.count("<h3>Protocol of ") == 4


def test_means_over_other_tasks_are_left_out_and_said_to_be(paper):
    document = across_document([paper("q15", "a"), paper("q3", "b"), paper("q7", "c", tasks=5)])
    table = tables(document)["matched-budget-means"]
    assert [line[0].text for line in table.sheet.rows] == ["a", "b"]
    assert table.remark == "Left out, because their tasks differ: c."


def test_studies_whose_titles_name_their_models_are_called_by_the_name_they_share(paper):
    one, two = paper("q15", "a"), paper("q3", "b")
    (study,) = one.studies
    titled = replace(study, study=study.study.model_copy(update={"title": "Matched budget on a"}))
    (section,) = across_document([replace(one, studies=(titled,)), two]).sections
    assert section.title == "Matched budget"
    assert section.main[0].sheet.title == "Matched budget: means over the tasks"


def test_two_campaigns_on_one_model_are_told_apart_by_name(paper):
    document = across_document([paper("q15", "a", campaign="one"), paper("q3", "a", campaign="two")])
    assert [line[0].text for line in tables(document)["matched-budget-means"].sheet.rows] == ["a (one)", "a (two)"]


def test_what_cannot_stand_side_by_side_is_refused_in_one_line(paper, results):
    with pytest.raises(ConfigError, match="'q3' comes twice"):
        across_document([paper("q3", "a"), paper("q3", "b")])
    other = results("  o:\n    title: O\n    axes: {model: [small], task: [svamp], method: [fcca], seed: [42]}\n")
    with pytest.raises(ArtifactError, match="q3, made-up share no study"):
        across_document([paper("q3", "a"), other])
