"""The report of a campaign: whole from its records, the same each time, and a page that works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from frozencore.tune.record import Failure
from frozencore_lab.campaign.plan import Choice
from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.reports.report import campaign_document, setup_section, study_section, write_document
from frozencore_lab.reports.sheet import latex
from small_runs import record_content, stability_content

STUDIES = """
  budget:
    title: "Matched <budget> & more"
    note: A note.
    axes:
      model: [small, large]
      task: [svamp, gsm8k]
      method: [fcca, rawgrad, lora]
      seed: [42, 43]
    report: {rows: [task], columns: [method], reference: fcca, figure: ranking}
  sides:
    title: Whitening sides
    axes: {model: [small], task: [svamp, gsm8k], whiten: [none, both], seed: [42, 43]}
    report: {rows: [task], columns: [whiten], reference: none, figure: gains}
  sizes:
    title: Calibration size
    axes: {model: [small], task: [svamp], method: [fcca, rawgrad], calibration_size: [64, 128], seed: [42, 43]}
    report: {rows: [method], columns: [calibration_size], figure: lines}
  stability:
    title: Basis stability
    kind: stability
    reference_size: 128
    axes: {model: [small], task: [svamp], calibration_size: [64, 128], seed: [42]}
    report: {rows: [task], columns: [calibration_size]}
  state:
    title: Trained state
    axes: {model: [small], task: [svamp], method: [fcca, lora], seed: [42]}
    report: {rows: [task], columns: [method], figure: state}
"""
VOID = ("meta", "img", "br", "link", "input")


@pytest.fixture(scope="module")
def sample(results):
    def record(axes):
        if axes.get("method") == "rawgrad" and axes["model"] == "large":
            return {"reason": "diverged", "message": "the loss is <nan>"} if axes["seed"] == 42 else None
        if "method" not in axes and "whiten" not in axes:
            return stability_content(axes, axes["calibration_size"] / 128)
        return record_content(axes)

    return results(STUDIES, record)


@pytest.fixture(scope="module")
def report(sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_document(campaign_document(sample), folder)
    return folder


def test_every_table_comes_in_three_formats_each_study_with_its_figure_and_twice_the_same_bytes(
    report, sample, tmp_path
):
    written = write_document(campaign_document(sample), tmp_path / "again")
    for path in written:
        assert path.read_bytes() == (report / path.relative_to(tmp_path / "again")).read_bytes()
    names = {path.relative_to(tmp_path / "again").as_posix() for path in written}
    for table in (
        "budget-small", "budget-large-loss", "budget-small-significance", "budget-small-time",
        "sides", "sizes-loss", "stability-cos-p", "stability-cos-q", "state-state",
    ):  # fmt: skip
        assert {f"tables/{table}.{ending}" for ending in ("md", "tex", "csv")} <= names
    figures = {name for name in names if name.startswith("figures/")}
    assert {
        f"figures/{name}.png" for name in ("budget-small", "budget-large-loss", "sides", "sizes", "stability", "state")
    } <= figures
    assert "report.md" in names
    assert "index.html" in names


def test_a_run_that_waits_for_its_search_is_in_the_table_and_says_why(study, campaign, tmp_path):
    yaml = STUDIES.split("  sides:")[0]
    made = study(yaml)
    *others, last = made.runs
    waits = replace(last, run_id=None, record=None, failure=Failure(reason="search", message="no trial finished"))
    write_document(
        campaign_document(CampaignResults(campaign(yaml), (replace(made, runs=(*others, waits)),))), tmp_path
    )
    page = (tmp_path / "index.html").read_text()
    assert "seed 43: search: no trial finished" in unescape(page)


def test_the_page_is_well_formed_loads_nothing_and_escapes_what_it_is_told(report):
    page = (report / "index.html").read_text()
    open_tags: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in VOID:
                open_tags.append(tag)
            given = dict(attributes)
            assert (given.get("src") or "data:").startswith("data:")
            assert (given.get("href") or "#").startswith("#")

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Check().feed(page)
    assert open_tags == []
    assert "Matched &lt;budget&gt; &amp; more" in page
    assert "<nan>" not in page


def test_no_two_tables_of_a_study_have_one_title_and_the_page_names_each(report, sample):
    for section in campaign_document(sample).sections:
        titles = [table.sheet.title for table in section.tables]
        assert len(titles) == len(set(titles))
    assert "<h3></h3>" not in (report / "index.html").read_text()


def test_what_a_search_chose_is_shown_with_every_trial_and_marked_at_an_end(study):
    yaml = """
  a:
    title: A
    axes: {model: [small], task: [svamp], method: [fcca], seed: [42]}
    search: {grids: [{learning_rate: [0.01, 0.02]}]}
"""
    group = {"model": "small", "task": "svamp", "method": "fcca"}
    for beyond, mark in ((None, ""), (0.04, " †")):
        trials = (({"learning_rate": 0.01}, None), ({"learning_rate": 0.02}, 0.815))
        choice = Choice({"learning_rate": 0.02}, trials, beyond)
        table = study_section(study(yaml, record_content, ((group, choice),))).tables[-1].sheet
        chosen = ["FCCA", f"lr 0.02{mark}", "81.5", "lr 0.01: failed; lr 0.02: 81.5"]
        assert [cell.text for cell in table.rows[0]] == chosen
        assert ("a better one may lie beyond it" in table.note) == (beyond is not None)


def test_equal_means_are_not_ordered_in_the_headline(study):
    yaml = "  a:\n    title: A\n    axes: {model: [small], task: [svamp], method: [eva, fcca], seed: [42]}\n"
    for accuracy, said in ((0.8, "EVA-core 80.0 and FCCA 80.0"), (0.9, "FCCA 90.0, then EVA-core 80.0")):
        made = {"eva": 0.8, "fcca": accuracy}
        section = study_section(
            study(yaml, lambda axes, made=made: record_content(axes, accuracy=made[axes["method"]]))
        )
        assert said in section.headlines[0]


def test_a_long_value_of_an_axis_names_its_files_shortly(results, tmp_path):
    many = [f"model.layers.{i}.self_attn.q_proj" for i in range(24)]
    one = f"    title: T\n    axes: {{model: [small], task: [svamp], targets: [{many}, [q_proj]], seed: [42]}}\n"
    report = "    report: {columns: [seed]}\n"
    written = write_document(campaign_document(results(f"  a:\n{one}{report}")), tmp_path)
    assert max(len(path.name) for path in written) < 100


def test_tables_of_two_studies_never_share_a_file(results, tmp_path):
    one = "    title: T\n    axes: {model: [small], task: [svamp], method: [fcca], seed: [42]}\n"
    written = write_document(campaign_document(results(f"  a:\n{one}  a-time:\n{one}")), tmp_path)
    assert len(set(written)) == len(written)


def in_browser(page: Path, script: str) -> dict:
    """The result of a script in the page, opened in a headless Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    tried = page.with_name("tried.html")
    found = f"<script>document.documentElement.dataset.found = JSON.stringify((() => {{{script}}})());</script>"
    tried.write_text(page.read_text().replace("</html>", f"{found}</html>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--dump-dom", tried.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (shown,) = re.findall(r'<html[^>]* data-found="([^"]*)"', dom)
    return json.loads(unescape(shown))


def test_in_a_browser_a_heading_sorts(report):
    script = """
    const table = document.querySelector('#budget').closest('section').querySelectorAll('table')[2];
    const column = (index) => [...table.tBodies[0].rows].map((row) => row.cells[index].dataset.value);
    const press = (index) => table.tHead.rows[0].cells[index].querySelector('button').click();
    press(1); const up = column(1); press(1); const down = column(1);
    return {up, down, foot: table.tFoot.rows.length};
    """
    found = in_browser(report / "index.html", script)
    assert found["up"] == sorted(found["up"], key=float)
    assert found["down"] == found["up"][::-1]
    assert found["foot"] == 2


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


def setup_of(results):
    """The sheets of the set-up by name."""
    return {table.sheet.name: table.sheet for table in setup_section(results).tables}


def sheets(file):
    campaign = read_campaign(file)
    return setup_of(CampaignResults(campaign, tuple(StudyResults(*one, (), ()) for one in campaign.studies.items())))


@pytest.fixture(scope="module")
def paper():
    return sheets(CAMPAIGNS / "paper-3b.yaml")


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
    found = sheets(CAMPAIGNS / "paper-3b-ablations.yaml")["hyper-parameters"]
    own = {line[0].text: dict(zip(found.headings, (cell.text for cell in line), strict=True)) for line in found.rows}
    assert own["rank-modules"]["modules"] == "q/v · q/k/v/o"
    assert own["rank"]["rank"] == "8 · 16 · 32 · 64"
    assert "coordinates raw" in own["no-qr-rates"]["further"]
    assert "shrinkage 0 · 0.25 · 0.5 · 0.75 · 1" in own["shrinkage"]["further"]
    assert (own["stability"]["learning rate"], own["stability"]["batch"]) == ("-", "-")
    assert r"8 $\cdot$ 16" in latex(found)


def test_a_variant_has_a_line_of_its_own_options_and_values(results):
    yaml = (
        "  a:\n    title: A\n    axes: {model: [small], task: [svamp], method: [fcca, fcca-r4], seed: [42]}\n"
        "    variants: {fcca-r4: {method: fcca, rank: 4, damping: 0.1}}\n"
    )
    sheet = setup_of(results(yaml))["hyper-parameters"]
    assert column(sheet, "methods") == ["FCCA", "FCCA r4"]
    assert column(sheet, "rank") == ["16", "4"]
    assert column(sheet, "calibration") == ["128", "128"]
    assert column(sheet, "further") == ["-", "damping 0.1"]


def test_generated_rows_and_own_files_have_an_origin_too(tmp_path):
    assert column(sheets(CAMPAIGNS / "demo.yaml")["data-sets"], "data set") == ["generated"] * 4
    (tmp_path / "rows.jsonl").write_text('{"q": "a", "n": "1"}\n')
    task = tmp_path / "own.yaml"
    task.write_text('name: own\nscoring: exact_match\nevaluation: rows.jsonl\nprompt: "{q}"\nanswer: n\n')
    file = tmp_path / "campaign.yaml"
    study = f"  a:\n    title: A\n    axes: {{model: [m], task: [{task}], method: [lora], seed: [42]}}\n"
    file.write_text(f"name: mine\nmodels: {{m: pocket}}\nstudies:\n{study}")
    data, options = sheets(file).values()  # and no constructors
    assert column(data, "data set") == ["own files"]
    assert column(data, "splits: train / validation / evaluation") == ["- / - / rows.jsonl"]
    assert column(options, "calibration") == ["reads none"]


def test_the_data_sets_have_the_numbers_of_each_study(results):
    yaml = (
        "  a:\n    title: A\n    axes: {model: [small], task: [svamp], method: [fcca, few], seed: [42]}\n"
        "    variants: {few: {method: fcca, num_train: 16}}\n    fixed: {num_evaluation: 40, calibration_task: gsm8k}\n"
        "  b:\n    title: B\n    axes: {model: [small], task: [svamp], method: [lora], epochs: [1, 4], seed: [42]}\n"
        "    fixed: {num_train: 64, num_evaluation: 40, forgetting: [cola]}\n"
    )
    sheet = setup_of(results(yaml))["data-sets"]
    assert column(sheet, "task") == ["SVAMP", "GSM8K", "CoLA"]
    assert column(sheet, "train") == ["16 · 64 · 700", "-", "-"]
    assert column(sheet, "evaluation") == ["40", "-", "-"]
    assert column(sheet, "epochs") == ["1 · 3 · 4", "-", "-"]
