"""A report's tables of data, options and constructors, against the paper's."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.reports.report import campaign_document, setup_section
from frozencore_lab.reports.sheet import latex

CAMPAIGNS = Path(__file__).parents[2] / "campaigns"
DATA_SETS = """
SVAMP & ChilleD/SVAMP & default & greedy exact match & 700 & 300 / 3
GSM8K & openai/gsm8k & main & greedy exact match & 1500 & 300 / 2
SST-2 & nyu-mll/glue & sst2 & likelihood MC & 2000 & 500 / 1
QNLI & nyu-mll/glue & qnli & likelihood MC & 2000 & 500 / 1
CoLA & nyu-mll/glue & cola & likelihood MC & 2000 & 500 / 2
RTE & nyu-mll/glue & rte & likelihood MC & 2000 & 500 / 3
MRPC & nyu-mll/glue & mrpc & likelihood MC & 2000 & 500 / 3
ARC-C & allenai/ai2_arc & ARC-Challenge & likelihood MC & 1119 & 500 / 3
OBQA & allenai/openbookqa & main & likelihood MC & 2000 & 500 / 3
HellaSwag & Rowan/hellaswag & default & likelihood MC & 2000 & 500 / 2
WinoG & allenai/winogrande & winogrande_xl & likelihood MC & 2000 & 500 / 2
"""
SIGNALS = {
    "Random": ("no", "no", "random draw"), "LoRA-XS-core": ("no", "weight", "spectrum of W"),
    "MiLoRA-core": ("no", "weight", "spectrum of W"), "EVA-core": ("indirect", "input", "A"),
    "FiLoRA-core": ("indirect", "input and output", "A, D"), "RawGrad": ("yes", "no", "G"),
    "FCCA": ("yes", "input and output", "G, a, d"),
}  # fmt: skip


def sheets(name):
    campaign = read_campaign(CAMPAIGNS / f"{name}.yaml")
    results = CampaignResults(campaign, tuple(StudyResults(*item, (), ()) for item in campaign.studies.items()))
    return {table.sheet.name: table.sheet for table in setup_section(results).tables}


@pytest.fixture(scope="module")
def paper():
    return sheets("paper-3b")


def column(sheet, heading):
    return [line[sheet.headings.index(heading)].text for line in sheet.rows]


def test_the_data_sets_are_the_papers(paper):
    found = paper["data-sets"]
    printed = [[cell.strip() for cell in line.split("&")] for line in DATA_SETS.strip().splitlines()]
    ours = zip(*(column(found, name) for name in ("task", "data set", "configuration", "scoring")), strict=True)
    assert [[*line[:3], line[3].replace("likelihood of choices", "likelihood MC")] for line in ours] == [
        line[:4] for line in printed
    ]
    sizes = zip(*(column(found, name) for name in ("train", "evaluation", "epochs")), strict=True)
    assert [(train.replace(",", ""), f"{rows} / {epochs}") for train, rows, epochs in sizes] == [
        (line[4], line[5]) for line in printed
    ]
    assert all(column(found, "licence"))
    assert column(found, "splits: train / validation / evaluation")[7] == "train / validation / test"


def test_the_options_are_those_of_the_papers_protocol(paper):
    found = paper["hyper-parameters"]
    own = {
        line[1].text: dict(zip(found.headings[2:], (cell.text for cell in line[2:]), strict=True))
        for line in found.rows
        if line[0].text == "matched-budget"
    }
    fcca = own.pop("FCCA")
    assert (fcca["learning rate"], fcca["warm-up"], fcca["calibration"]) == ("0.005", "{0.03, 0.1}", "{128, 256}")
    assert fcca["selection"] == "4 trials by accuracy, seed 42"
    assert {line["learning rate"] for line in own.values()} == {"{0.002, 0.005}"}
    assert {line["warm-up"] for line in own.values()} == {"0.1"}
    assert {line["selection"] for line in own.values()} == {"2 trials by accuracy, seed 42"}
    for line in (fcca, *own.values()):
        assert (line["rank"], line["modules"], line["precision"]) == ("16", "attention", "bfloat16")
        assert (line["batch"], line["seeds"]) == ("1 × 8 = 8", "42, 43, 44")
    assert sum(len(names.split(", ")) for names in own) == 7


def test_what_constructors_look_at_is_what_the_paper_says(paper):
    found = {line[0].text: tuple(cell.text for cell in line[1:]) for line in paper["constructors"].rows}
    assert {name: found[name] for name in SIGNALS} == SIGNALS


def test_what_a_study_varies_fixes_and_does_not_do_is_told_apart():
    found = sheets("paper-3b-ablations")["hyper-parameters"]
    own = {line[0].text: dict(zip(found.headings, (cell.text for cell in line), strict=True)) for line in found.rows}
    assert own["rank-modules"]["modules"] == "q/v · q/k/v/o"
    assert own["rank"]["rank"] == "8 · 16 · 32 · 64"
    assert "coordinates raw" in own["no-qr-rates"]["further"]
    assert "shrinkage 0 · 0.25 · 0.5 · 0.75 · 1" in own["shrinkage"]["further"]
    assert (own["stability"]["learning rate"], own["stability"]["batch"]) == ("-", "-")
    assert r"8 $\cdot$ 16" in latex(found)


def test_the_trained_values_are_those_of_the_records(results, make_record):
    yaml = "  a:\n    title: A\n    axes: {model: [small], task: [svamp], method: [fcca, lora], seed: [42]}\n"
    document = campaign_document(results(yaml, make_record))
    sheet = next(table.sheet for table in document.sections[-1].tables if table.sheet.name == "hyper-parameters")
    assert column(sheet, "values") == ["36,864", "7,372,800"]
    empty = campaign_document(results(yaml, lambda axes: None)).sections[-1].tables[1].sheet
    assert column(empty, "values") == ["-", "-"]


def test_a_variant_has_a_line_of_its_own_options_and_values(results, make_record):
    yaml = (
        "  a:\n    title: A\n    axes: {model: [small], task: [svamp], method: [fcca, fcca-r4], seed: [42]}\n"
        "    variants: {fcca-r4: {method: fcca, rank: 4, damping: 0.1}}\n"
    )
    document = campaign_document(results(yaml, make_record))
    sheet = next(table.sheet for table in document.sections[-1].tables if table.sheet.name == "hyper-parameters")
    assert column(sheet, "methods") == ["FCCA", "FCCA r4"]
    assert column(sheet, "rank") == ["16", "4"]
    assert column(sheet, "calibration") == ["128", "128"]
    assert column(sheet, "further") == ["-", "damping 0.1"]


def test_generated_rows_and_own_files_have_an_origin_too(tmp_path):
    assert column(sheets("demo")["data-sets"], "data set") == ["generated"] * 4
    (tmp_path / "rows.jsonl").write_text('{"q": "a", "n": "1"}\n')
    task = tmp_path / "own.yaml"
    task.write_text('name: own\nscoring: exact_match\nevaluation: rows.jsonl\nprompt: "{q}"\nanswer: n\n')
    file = tmp_path / "campaign.yaml"
    study = f"  a:\n    title: A\n    axes: {{model: [m], task: [{task}], method: [lora], seed: [42]}}\n"
    file.write_text(f"name: mine\nmodels: {{m: pocket}}\nstudies:\n{study}")
    campaign = read_campaign(file)
    results = CampaignResults(campaign, tuple(StudyResults(*item, (), ()) for item in campaign.studies.items()))
    data, options = (table.sheet for table in setup_section(results).tables)  # and no constructors
    assert column(data, "data set") == ["own files"]
    assert column(data, "splits: train / validation / evaluation") == ["- / - / rows.jsonl"]
    assert column(options, "calibration") == ["reads none"]
