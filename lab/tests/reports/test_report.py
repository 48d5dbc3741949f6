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
from frozencore_lab.campaign.results import CampaignResults
from frozencore_lab.reports.report import campaign_document, count_runs, study_section, write_document

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
def sample(results, make_record):
    def record(axes):
        if axes.get("method") == "rawgrad" and axes["model"] == "large":
            return {"reason": "diverged", "message": "the loss is <nan>"} if axes["seed"] == 42 else None
        if "method" not in axes and "whiten" not in axes:
            return {"config": {}, "cosine_P": axes["calibration_size"] / 128, "cosine_Q": 1.0, "reference_size": 128}
        return make_record(axes)

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


def test_what_is_missing_is_counted_on_top_of_the_page_and_of_the_text(report):
    said = "40 of 44 final runs done, 2 failed, 2 missing"
    assert said in (report / "report.md").read_text()[:200]
    assert said in (report / "index.html").read_text().split("<nav>")[0]


def test_a_run_that_waits_for_its_search_is_in_the_table_and_says_why_but_has_no_dialog(study, campaign, tmp_path):
    yaml = STUDIES.split("  sides:")[0]
    made = study(yaml)
    *others, last = made.runs
    waits = replace(last, run_id=None, record=None, failure=Failure(reason="search", message="no trial finished"))
    write_document(
        campaign_document(CampaignResults(campaign(yaml), (replace(made, runs=(*others, waits)),))), tmp_path
    )
    page = (tmp_path / "index.html").read_text()
    facts = json.loads(re.search(r'<script type="application/json" id="runs">(.*?)</script>', page).group(1))
    assert set(facts) == {run.run_id for run in others}
    assert "seed 43: search: no trial finished" in unescape(page)


def test_a_run_that_two_studies_share_counts_once(study, make_record):
    axes = "{model: [small], task: [svamp], method: [fcca], seed: [42, 43]}"
    made = study(f"  a:\n    title: A\n    axes: {axes}\n", make_record)
    assert count_runs(made.runs + made.runs).done == 2


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


def test_each_cell_carries_its_runs(report, sample):
    page = (report / "index.html").read_text()
    facts = json.loads(re.search(r'<script type="application/json" id="runs">(.*?)</script>', page).group(1))
    runs = [run for study in sample.studies for run in study.runs]
    assert set(facts) == {run.run_id for run in runs}
    some = facts[runs[0].run_id]
    assert some["model hash"] == "a1" * 8
    assert "commit c3c3" in some["source"]
    assert all(run.run_id in page.split('id="runs"')[0] for run in runs)


def test_what_the_search_chose_is_shown_with_every_trial(study, make_record):
    yaml = """
  a:
    title: A
    axes: {model: [small], task: [svamp], method: [fcca], seed: [42]}
    search: {grids: [{warmup: [0.03, 0.1]}]}
"""
    choice = Choice({"warmup": 0.1}, (({"warmup": 0.03}, None), ({"warmup": 0.1}, 0.815)))
    group = {"model": "small", "task": "svamp", "method": "fcca"}
    table = study_section(study(yaml, make_record, ((group, choice),))).tables[-1].sheet
    assert table.name == "a-search"
    assert [cell.text for cell in table.rows[0]] == [
        "FCCA",
        "warmup 0.1",
        "81.5",
        "warmup 0.03: failed; warmup 0.1: 81.5",
    ]
    assert "†" not in table.note


def test_a_search_that_still_ends_at_an_end_is_marked(study, make_record):
    yaml = """
  a:
    title: A
    axes: {model: [small], task: [svamp], method: [fcca], seed: [42]}
    search: {grids: [{learning_rate: [0.01, 0.02]}]}
"""
    choice = Choice({"learning_rate": 0.02}, (({"learning_rate": 0.01}, 0.8), ({"learning_rate": 0.02}, 0.9)), True)
    group = {"model": "small", "task": "svamp", "method": "fcca"}
    table = study_section(study(yaml, make_record, ((group, choice),))).tables[-1].sheet
    assert table.rows[0][1].text == "lr 0.02 †"
    assert "a better one may lie beyond it" in table.note


def test_tables_of_two_studies_never_share_a_file(results, tmp_path):
    one = "    title: T\n    axes: {model: [small], task: [svamp], method: [fcca], seed: [42]}\n"
    written = write_document(campaign_document(results(f"  a:\n{one}  a-time:\n{one}")), tmp_path)
    assert len(set(written)) == len(written)


def test_a_campaign_that_has_not_begun_has_a_report(results, tmp_path):
    written = write_document(campaign_document(results(STUDIES, lambda axes: None)), tmp_path)
    assert not [path for path in written if path.suffix == ".png"]
    assert "0 of 44 final runs done, 0 failed, 44 missing" in (tmp_path / "report.md").read_text()


def test_a_ranking_waits_for_a_whole_column(results, make_record, tmp_path):
    yaml = STUDIES.split("  sides:")[0]
    begun = results(yaml, lambda axes: make_record(axes) if axes["task"] == "svamp" else None)
    assert not [path for path in write_document(campaign_document(begun), tmp_path) if path.suffix == ".png"]


def in_browser(page: Path, script: str, *, width: int = 1400, scheme: str = "light") -> dict:
    """The result of a script in the page, opened in a headless Chromium in a frame of this width."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    tried, frame = page.with_name("tried.html"), page.with_name("frame.html")
    found = f"<script>parent.postMessage(JSON.stringify((() => {{{script}}})()), '*');</script>"
    tried.write_text(page.read_text().replace("</html>", f"{found}</html>"))
    frame.write_text(
        "<!doctype html><html style='color-scheme: light dark'><script>addEventListener('message', (event) => "
        "{ document.documentElement.dataset.found = event.data; });</script>"
        f"<iframe width={width} height=900 style='border: 0' src='{tried.name}'></iframe></html>"
    )
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--virtual-time-budget=5000",
        "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (shown,) = re.findall(r'<html[^>]* data-found="([^"]*)"', dom)
    return json.loads(unescape(shown))


def test_in_a_browser_a_heading_sorts_and_a_cell_opens_to_its_runs(report):
    script = """
    const table = document.querySelector('#budget').closest('section').querySelectorAll('table')[2];
    const column = (index) => [...table.tBodies[0].rows].map((row) => row.cells[index].dataset.value);
    const press = (index) => table.tHead.rows[0].cells[index].querySelector('button').click();
    press(1); const up = column(1); press(1); const down = column(1);
    table.tBodies[0].rows[0].cells[1].querySelector('button').click();
    const box = document.querySelector('dialog');
    return {up, down, foot: table.tFoot.rows.length, open: box.open, text: box.textContent};
    """
    found = in_browser(report / "index.html", script)
    assert found["up"] == sorted(found["up"], key=float)
    assert found["down"] == found["up"][::-1]
    assert found["foot"] == 2
    assert found["open"]
    assert "seed 42" in found["text"]
    assert "a1a1a1a1a1a1a1a1" in found["text"]


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (400, "light"), (1400, "dark")])
def test_in_a_browser_the_page_fits_a_phone_and_keeps_its_contrast_in_the_dark(report, width, scheme):
    script = """
    document.querySelectorAll('details').forEach((one) => { one.open = true; });
    const shade = (name) => getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3).map(Number);
    const widest = (name) => Math.max(...[...document.querySelectorAll(name)].map((one) => one.scrollWidth));
    const pieces = [...document.querySelectorAll('table.many td')].map((one) => one.childNodes.length);
    return {pieces: Math.max(...pieces),
      page: document.documentElement.scrollWidth, window: innerWidth, table: widest('table'),
      text: shade('color'), ground: shade('backgroundColor')};
    """
    found = in_browser(report / "index.html", script, width=width, scheme=scheme)
    assert found["page"] <= found["window"] == width
    assert found["pieces"] == 1  # of a cell, which stands beside its heading
    assert found["table"] <= width or width > 400
    assert (sum(found["ground"]) < 150) == (scheme == "dark")
    assert contrast(found["text"], found["ground"]) > 7


def test_figures_stand_one_a_row_with_letters_that_can_be_read(report):
    script = """
    document.querySelectorAll('details').forEach((one) => { one.open = true; });
    const images = [...document.querySelector('#budget').closest('section').querySelectorAll('figure img')];
    return {lefts: images.map((one) => one.getBoundingClientRect().left), page: document.body.clientWidth - 32,
      widths: images.map((one) => one.clientWidth), pixels: images.map((one) => one.naturalWidth)};
    """
    found = in_browser(report / "index.html", script)
    assert len(found["lefts"]) > 1
    assert len(set(found["lefts"])) == 1
    assert all(width == min(960, found["page"]) for width in found["widths"])
    for width, pixels in zip(found["widths"], found["pixels"], strict=True):
        points = 12 * 160 / 72  # of a letter, in the pixels of the file
        assert points * width / pixels > 12


def test_no_heading_below_a_study_says_its_title_again_and_what_was_found_stands_first(report):
    page = unescape((report / "index.html").read_text())
    section = page.split('<h2 id="sides">')[1].split("</section>")[0]
    assert section.startswith("Whitening sides</h2>")
    assert "Whitening sides" not in re.sub(r'alt="[^"]*"', "", section.removeprefix("Whitening sides</h2>"))
    first = page.index("<ul class=headlines>")
    assert first < page.index("<nav>") < page.index("<h2")
    found = page[first:]
    assert re.search(r'<a href="#budget">Matched <budget> & more, small: \S+ \d+\.\d ± \d\.\d, then \S+ \d+\.\d', found)
    assert re.search(r'<a href="#state">Trained state: \S+ [\d.]+, then \S+ [\d.]+ \(accuracy, %, SVAMP\)', found)
    assert '<a href="#budget">Matched' not in page[page.index("<nav>") : page.index("</nav>")]


def contrast(first: list[int], second: list[int]) -> float:
    """WCAG's contrast ratio of two sRGB colours."""

    def luminance(colour: list[int]) -> float:
        parts = [part / 255 for part in colour]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)
