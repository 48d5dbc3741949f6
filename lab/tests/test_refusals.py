"""What the lab refuses: each is one line with the place and the way out, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures import PAPER_TABLES
from frozencore.errors import ConfigError, DataError
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.reports.comparison import TaskTable, analyse, read_task_means
from small_campaign import write_spec

HEAD = "name: x\nmodels: {pocket: pocket}\nstudies:\n  main:\n    title: t\n"
AXES = "    axes: {model: [pocket], task: [pocket-math], method: [fcca], seed: [42]}\n"
STUDY = HEAD + AXES
WITH_VARIANT = HEAD + AXES.replace("[fcca]", "[fcca, small]")
WHITEN = STUDY.replace("method: [fcca]", "whiten: [none, input, output, both]")
TWIN = "title: t, axes: {model: [pocket], task: [pocket-math], seed: [42]}"

SPECIFICATIONS = [
    (STUDY + "    colour: red\n", r"line 7: studies\.main\.colour: extra inputs are not permitted"),
    (STUDY + "    title: again\n", "line 7: the key 'title' is given twice"),
    (STUDY.replace("seed: [42]", "seed: [42], sede: [1]"), "line 6.*no option 'sede'. Did you mean 'seed'"),
    (STUDY.replace(", seed: [42]", ""), "line .*needs the axis seed"),
    (STUDY.replace("[pocket]", "[rocket]"), "no model 'rocket'. Did you mean 'pocket'"),
    (STUDY.replace("[42]", "[42, 42]"), "names a value twice"),
    (STUDY + "    reference_size: 8\n", "belongs to 'kind: stability'"),
    (STUDY + "    kind: tine\n", "line 7: studies.main.kind: input should be 'tune', 'stability' or 'profile'"),
    (
        STUDY + "    kind: stability\n    reference_size: 8\n    search: {grids: [{rank: [4, 8]}]}\n",
        "A stability study trains nothing: it takes no search",
    ),
    (STUDY + "    search: {grids: [{learning_rat: [1e-3]}]}\n", "line 7.*Did you mean 'learning_rate'"),
    (STUDY + "    search: {grids: [{learning_rate: 1e-3}]}\n", "line 7.*learning_rate: input should be a valid"),
    (STUDY + "    fixed: {learning_rate: .nan}\n", "line 7: studies.main.fixed.learning_rate: .* finite number"),
    (STUDY + "    report: {rows: [rank]}\n", "no axis of this study 'rank'"),
    (STUDY + "    variants: {small: {method: fcca, rank: 4}}\n", "small is no value of the axis method"),
    (STUDY + "    variants: {fcca: {method: eva}}\n", "variant fcca is of eva, but fcca is a method"),
    (WITH_VARIANT + "    variants: {small: {rank: 4}}\n", "variant small does not say which method it is"),
    (WITH_VARIANT + "    variants: {small: {method: fcca, seed: 1}}\n", "gives seed, which is an axis"),
    (WITH_VARIANT + "    variants: {small: {method: fcca, rnak: 4}}\n", "line 7.*Did you mean 'rank'"),
    (STUDY + "    search: {grids: [{for: [fcaa], rank: [4, 8]}]}\n", "no method 'fcaa'. Did you mean 'fcca'"),
    (
        STUDY + "    search: {grids: [{for: [fcca], rank: [4, 8]}, {for: [fcca], warmup: [0.1, 0.2]}]}\n",
        "A method has one grid of its search, but 2 are for fcca",
    ),
    (
        STUDY + "    search: {grids: [{rank: [4, 8]}, {for: [fcca], warmup: [0.1, 0.2]}]}\n",
        "A grid without 'for' is for all methods that are left: it comes last",
    ),
    (STUDY + "    search: {grids: [{rank: [4, 4]}]}\n", "A grid names a value of rank twice"),
    *(
        (STUDY + f"    search: {{grids: [{{{grid}}}]}}\n", f"A grid tries {grid.partition(':')[0]}, which an axis")
        for grid in ("task: [sst2, cola]", "method: [lora, dora]", "evaluate_on: [validation, evaluation]")
    ),
    (
        WITH_VARIANT + "    variants: {small: {method: fcca, rank: 1}}\n    search: {grids: [{rank: [8, 16]}]}\n",
        "A grid tries rank, which an axis, a variant or the search decides",
    ),
    (STUDY + "    fixed: {task: sst2}\n", "fixed gives task, which is an axis"),
    (STUDY + "    report: {rows: [method], columns: [method]}\n", "method comes twice in its rows and columns"),
    (STUDY + "    report: {reference: fcac}\n", "no column to compare with 'fcac'. Did you mean 'fcca'"),
    (
        WHITEN + "    report: {columns: [whiten], reference: none, differences: [boht]}\n",
        "no column to show the difference of 'boht'. Did you mean 'both'",
    ),
    (
        WHITEN + "    report: {columns: [whiten], differences: [both]}\n",
        "need a reference: one of the columns none, input, output, both",
    ),
    ("- a\n- b\n", "must hold a campaign"),
    (STUDY + "    fixed: {warmup: !!python/object/apply:os.getcwd []}\n", "line 7: could not determine"),
    *(
        (STUDY.replace("name: x", f"name: {name}"), "line 1: name: string should match pattern")
        for name in ("../x", '"x\\ny"', "x" * 300, "X", "..", "x/", "'x\n\n'")
    ),
    *((f"{STUDY}  {twin}: {{{TWIN}}}\n", ", line .*pattern") for twin in ("Main", "../main", '"main\\n"')),
    *(
        (STUDY.replace("{pocket: pocket}", f"{{pocket: pocket, {twin}: pocket}}"), "pattern")
        for twin in ("Pocket", "../pocket", '"pocket\\n"', "p" * 300)
    ),
]


@pytest.mark.parametrize(("text", "message"), SPECIFICATIONS)
def test_a_wrong_specification_gets_one_line_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_campaign(write_spec(tmp_path, text))


MANY = str(list(range(1000)))
RUNS = [
    ({"learning_rate": "1e-3"}, "learning_rate must be one of auto or a number above 0, but '1e-3' was given"),
    ({"rank": 8.5}, "rank must be a whole number from 1 to 100000, but 8.5"),
    ({"rank": 0}, "rank must be a whole number from 1 to 100000, but 0"),
    ({"whiten": "sideways"}, "whiten must be one of both, input"),
    ({"damping": [0.1, 0.1, 0.1]}, "damping must be a number above 0 or a list of 2"),
    ({"calibration_task": ["sst2", "cola"]}, r"There is no task .*'sst2', 'cola'"),
    ({"task": None}, "A run learns rows: give --data FILE, or --data task:NAME"),
    ({"method": "fca"}, "'fca'. Did you mean 'fcca'"),
    ({"method": "eva", "damping": 0.1}, "The method 'eva' does not read damping"),
    *(
        ({"task": None, **rows}, "the standard input can be read once")
        for rows in (
            {"data": "-"},
            {"data": ["a.jsonl", "-"]},
            {"data": "a.jsonl", "eval_data": "-"},
            {"data": "a.jsonl", "calibration_data": "-"},
        )
    ),
]


@pytest.mark.parametrize(("options", "message"), RUNS)
def test_options_of_a_run_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_job("tune", {"model": "pocket", "task": "pocket-math", "seed": 42, **options})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STUDY + "    fixed: {rank: 0}\n", "Study 'main': .*rank must be a whole number from 1 to 100000, but 0"),
        (
            STUDY.replace("[42]", MANY).replace("[pocket-math]", f"[pocket-math], rank: {list(range(1, 102))}"),
            "at most 100,000 runs",
        ),
    ],
)
def test_a_campaign_that_cannot_run_is_refused_with_its_study(text: str, message: str, tmp_path: Path) -> None:
    campaign = read_campaign(write_spec(tmp_path, text))
    with pytest.raises(ConfigError, match=message):
        plan(campaign, lambda _: None)


TABLES = [
    ("task,a,b\nx,1,\ny,1,2\n", "line 2: b on x is missing"),
    ("task,a,b\nx,1,2\ny,nan,2\n", "line 3: a on y must be a finite number, but 'nan'"),
    ("task,a,b\nx,1,2\ny,79.7±1.5,2\n", "'79.7±1.5' was given"),
    ("task,a,b\nx,1,1e999\ny,1,2\n", "finite number, but '1e999'"),
    ("task,a,a\nx,1,2\n", "column 'a' twice"),
    ("task,a,b\nx,1,2\nx,1,2\n", "task 'x' twice"),
    ("task,a,b\nx,1\n", "line 2: x must have 2 numbers, but 1 was given"),
    ("task,a,b\nx,1,2\nMean,1,2\n", "'Mean' is no task but a summary"),
    ("task,,b\nx,1,2\n", "column without a name"),
    ("task;a;b\nx;1;2\n", "one column only"),
    ("", "holds no table"),
]


@pytest.mark.parametrize(("text", "message"), TABLES)
def test_a_table_of_task_means_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_task_means(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("columns", "reference", "message"),
    [
        ({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0, "y": None}}, "a", "b on y is missing"),
        ({"a": {"x": 1.0, "y": 2.0}}, "a", "two columns and two tasks"),
        ({"FCCA": {"x": 1.0, "y": 2.0}}, "fca", "no column 'fca'. Did you mean 'FCCA'"),
    ],
)
def test_a_comparison_without_its_numbers_is_refused(columns: Any, reference: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        analyse(TaskTable(("x", "y"), columns), reference)


PAPER = str(PAPER_TABLES / "paper_q3.csv")
COMMANDS = [
    (("report",), "give one of them"),
    (("report", "/nowhere", "--table", PAPER, "--reference", "FCCA"), "give one of them"),
    (("report", "--table", PAPER), "needs --reference"),
    (("report", "--table", "/nowhere.csv", "--reference", "FCCA"), "No such file"),
    (("report", "OWN", "--reference", "FCCA"), "go with --table"),
    (("report", "--table", PAPER, "--reference", "FCCA", "--out", "x"), "Leave --out out"),
    (("run", "SPEC", "--data-root", "/nowhere"), "there is no folder /nowhere"),
    (("run", "SPEC", "--device", "cuda:99"), "cuda:99"),
    (("status", "/nowhere"), "no campaign's folder"),
    (("plan", "/nowhere.yaml"), "/nowhere.yaml: No such file or directory"),
    (("run", PAPER), "must hold a campaign"),
    (("plan", "SPEC", "--model-path", "pocket"), "--model-path takes NAME=FOLDER, got 'pocket'"),
    (("plan", "SPEC", "--model-path", "=folder"), "--model-path takes NAME=FOLDER, got '=folder'"),
    (("plan", "SPEC", "--model-path", "pocket="), "--model-path takes NAME=FOLDER, got 'pocket='"),
    (("plan", "SPEC", "--model-path", "other=folder"), "other=...: the campaign's models are pocket"),
    (("run", "SPEC", "--out", "OTHERS"), "holds the campaign 'other', not 'small'"),
    (("rehearse", "SPEC", "--out", "OTHERS"), "holds something that is no rehearsal"),
    (("run", "SPEC", "--out", "x" * 300), "xxxxx"),
    (("run", "SPEC", "--out", "SPEC/inside"), "small.yaml"),
    (("run", "SPEC", "--out", "/proc/frozencore"), "/proc/frozencore"),
    (("run", "SPEC", "--ray", "auto", "--workers", "0"), "--workers 0 is this process alone, --ray is a cluster"),
    (("run", "SPEC", "--ray", "auto", "--device", "cuda:1"), "On a cluster --device is auto, cpu, cuda, not 'cuda:1'"),
    (("run", "SPEC", "--ray", "127.0.0.1:1"), "No Ray cluster answers at 127.0.0.1:1 ("),
    (("run", "SPEC", "--ray", "nowhere"), "No Ray cluster answers at nowhere ("),
    (("run", "SPEC", "--ray", "ray://127.0.0.1:10001"), "--ray takes HOST:PORT or auto, got ray://127.0.0.1:10001."),
    *(
        (("one", run_id, "--out", "OWN"), "has no run")
        for run_id in ("../../x", "a\nb", "x" * 300, "ABCDEF0123456789", "", ".", "0" * 16)
    ),
]


@pytest.mark.parametrize(("words", "message"), COMMANDS)
def test_a_command_is_refused_in_one_line_and_touches_nothing(
    words: tuple[str, ...], message: str, command: Callable[..., tuple[int, str, str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if message.startswith(("No Ray", "--ray takes")):
        pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    spec = write_spec(tmp_path)
    Store(tmp_path / "own").open(read_campaign(spec))
    other = read_campaign(spec).model_copy(update={"name": "other"})
    Store(tmp_path / "others").open(other)
    places = {"SPEC": spec, "SPEC/inside": spec / "inside", "OTHERS": tmp_path / "others", "OWN": tmp_path / "own"}
    before = sorted(tmp_path.rglob("*"))
    status, _, errors = command("campaign", *(places.get(word, word) for word in words))
    (line,) = errors.splitlines()
    assert status == 2
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before
