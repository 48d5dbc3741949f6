"""From a specification to runs: options, ids, searches, choices, what is shared, and estimates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fixtures import LAB
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.constructors import CONSTRUCTORS
from frozencore.errors import ConfigError
from frozencore.options import COMMAND_NAMES, options_of
from frozencore.tune.config import ALIASES, PLACES, run_options
from frozencore.tune.record import Failure
from frozencore_lab.campaign.job import KINDS, Job, make_job
from frozencore_lab.campaign.plan import Ended, Outcomes, Planned, choices, most_further_trials, plan
from frozencore_lab.campaign.results import load_results, tally
from frozencore_lab.campaign.shared_moments import moments_key, needs_of
from frozencore_lab.campaign.spec import Campaign, column_key, read_campaign
from frozencore_lab.campaign.store import Store
from small_campaign import write_spec
from small_runs import made_up_record, record_content

OPTIONS: dict[str, Any] = {"model": "pocket", "task": "pocket-math", "seed": 42}


def campaign_of(folder: Path, **studies: dict[str, Any]) -> Campaign:
    """A campaign of studies of one task under one seed, unless their axes say otherwise."""
    axes = {"model": ["pocket"], "task": ["pocket-math"], "seed": [42]}
    made = {name: {"title": name, **study, "axes": axes | study["axes"]} for name, study in studies.items()}
    content = {"name": "x", "models": {"pocket": "pocket"}, "studies": made}
    return read_campaign(write_spec(folder, yaml.safe_dump(content, sort_keys=False)))


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return read_campaign(write_spec(tmp_path))


def unknown(_: str) -> None:
    return None


def scored(**values: Any) -> Ended:
    return made_up_record({"task": "pocket-math"}, **values)


def test_the_id_is_the_configuration_and_nothing_else() -> None:
    job = make_job("tune", OPTIONS)
    assert job.id == make_job("tune", {**OPTIONS, "rank": 16}).id  # the default, written out
    assert (
        job.id == make_job("tune", {**OPTIONS, "learning_rate": 1e-2, "epochs": 3}).id
    )  # what the task and method say
    moved = job.config.replaced(device="cuda:1", data_root=Path("/elsewhere"))
    assert job.id == replace(job, config=moved).id
    others = ({"rank": 8}, {"seed": 43}, {"damping": 0.1}, {"tokens": "completion"}, {"evaluate_on": "validation"})
    ids = {make_job("tune", {**OPTIONS, **other}).id for other in others} | {make_job("profile", OPTIONS).id, job.id}
    assert len(ids) == len(others) + 2


def test_where_and_how_much_at_a_time_sums_are_made_decides_neither_them_nor_at_its_default_a_run() -> None:
    plain = make_job("tune", OPTIONS)
    assert make_job("tune", {**OPTIONS, "group_size": 999, "stats_device": None}).id == plain.id
    for option in ({"group_size": 4}, {"stats_device": "cpu"}):
        job = make_job("tune", OPTIONS | option)
        assert job.id != plain.id  # a study may compare them
        assert job.resolved["calibration"] == option
        assert moments_key(job.config) == moments_key(plain.config)


def test_a_variant_is_the_run_of_its_options_and_is_searched_under_its_own_name(tmp_path: Path) -> None:
    study = {
        "axes": {"method": ["lora", "lora-r1"]}, "fixed": {"rank": 4},
        "variants": {"lora-r1": {"method": "lora", "rank": 1}},
        "search": {"grids": [{"for": ["lora-r1"], "learning_rate": [1e-2, 2e-2]}]},
    }  # fmt: skip
    plain, *trials, blocked = plan(campaign_of(tmp_path, main=study), unknown)
    assert plain.job.id == make_job("tune", {**OPTIONS, "method": "lora", "rank": 4}).id
    assert blocked.job is None
    assert blocked.axes["method"] == "lora-r1"
    of_rank_1 = {**OPTIONS, "method": "lora", "rank": 1, "evaluate_on": "validation"}
    assert [trial.job.id for trial in trials if trial.job] == [
        make_job("tune", of_rank_1 | {"learning_rate": rate}).id for rate in (1e-2, 2e-2)
    ]


def test_damping_may_be_a_pair_for_the_two_sides() -> None:
    one, pair = (make_job("tune", {**OPTIONS, "damping": damping}) for damping in (0.1, [0.1, 0.01]))
    assert one.id != pair.id
    damping = pair.config.method.core["damping"]
    assert damping == pair.config.method.core["damping"] == (0.1, 0.01)
    assert column_key((damping,)) == "0.1/0.01"


def test_a_task_calibrated_on_itself_is_the_plain_run_and_stands_under_its_axis_value(tmp_path: Path) -> None:
    tasks = ["pocket-math", "pocket-sentiment"]
    campaign = campaign_of(
        tmp_path, plain={"axes": {"method": ["fcca"]}},
        mismatch={"axes": {"calibration_task": tasks}, "report": {"columns": ["calibration_task"]}},
    )  # fmt: skip
    plain, matched, other = (run.job for run in plan(campaign, unknown))
    assert plain == matched
    assert plain != other
    store = Store(tmp_path / "out")
    store.open(campaign)
    with store.running(plain.id) as folder:
        (folder / "result.json").write_text(json.dumps(record_content({"task": "pocket-math"}, accuracy=0.25)))
    found = {run.axes["calibration_task"]: run.record for run in load_results(store.folder).studies[1].runs}
    assert found["pocket-math"].accuracy == 0.25
    assert found["pocket-sentiment"] is None


def test_final_runs_wait_for_their_search_and_take_what_it_chose(campaign: Campaign) -> None:
    runs = [run for run in plan(campaign, unknown) if run.study == "main"]
    trials = [run for run in runs if run.phase == "search" and run.axes["method"] == "fcca"]
    assert [run.axes["warmup"] for run in trials] == [0.03, 0.1]
    assert all(run.job and run.job.config.scoring.evaluate_on == "validation" for run in trials)
    finals = [run for run in runs if run.phase == "final" and run.axes["method"] == "fcca"]
    assert [run.job for run in finals] == [None, None]

    accuracy = {trials[0].job.id: 0.5, trials[1].job.id: 0.6}  # type: ignore[union-attr]

    def outcome(run_id: str) -> Ended | None:
        return scored(accuracy=accuracy[run_id], held_out_loss=1.0) if run_id in accuracy else None

    finals = [run for run in plan(campaign, outcome) if run.phase == "final" and run.axes.get("method") == "fcca"]
    assert [run.job.config.training.warmup for run in finals if run.job] == [0.1, 0.1]
    assert [run.job.config.rows.seed for run in finals if run.job] == [42, 43]
    assert {run.job.config.scoring.evaluate_on for run in finals if run.job} == {"evaluation"}
    ((study, group, choice),) = choices(campaign, outcome)
    assert (study, group["method"], choice.options) == ("main", "fcca", {"warmup": 0.1})


def test_equally_accurate_trials_are_told_apart_by_their_loss(campaign: Campaign) -> None:
    trials = [r.job.id for r in plan(campaign, unknown) if r.phase == "search" and r.job and r.axes["method"] == "eva"]
    loss = dict(zip(trials, (1.5, 1.4), strict=True))
    found = choices(campaign, lambda i: scored(accuracy=0.5, held_out_loss=loss[i]) if i in loss else None)
    assert found[0][2].options == {"learning_rate": 5e-3}


def test_a_search_without_a_good_trial_blocks_its_final_runs(campaign: Campaign) -> None:
    runs = plan(campaign, lambda _: Failure(reason="diverged", message="loss nan."))
    blocked = [run for run in runs if run.phase == "final" and run.study == "main" and run.axes["method"] == "eva"]
    assert [run.blocked for run in blocked] == ["no trial of the search succeeded (diverged: loss nan.)"] * 2


@pytest.mark.parametrize("name", ["accuracy", "held_out_loss"])
def test_a_trial_without_a_number_is_never_chosen(name: str, campaign: Campaign) -> None:
    for worst in (0, 1):
        trials = [r for r in plan(campaign, unknown) if r.phase == "search" and r.axes["method"] == "eva"]
        values = {"accuracy": 0.1, "held_out_loss": 2.0}
        outcomes = [scored(**values | ({name: None} if i == worst else {})) for i in range(2)]
        of_run = {run.job.id: outcome for run, outcome in zip(trials, outcomes, strict=True) if run.job}
        ((_, _, choice),) = choices(campaign, of_run.get)
        assert choice.options == {"learning_rate": trials[1 - worst].axes["learning_rate"]}


def test_a_search_by_accuracy_refuses_a_task_without_one(campaign: Campaign) -> None:
    with pytest.raises(ConfigError, match="selects by accuracy"):
        plan(campaign, lambda _: scored(accuracy=...))


def searched(folder: Path, rates: list[float], **search: Any) -> Campaign:
    grid = {"warmup": [0.03, 0.1], "learning_rate": rates}
    axes = {"method": ["fcca"], "seed": [42, 43]}
    return campaign_of(folder, main={"axes": axes, "search": {"select": "held_out_loss", "grids": [grid], **search}})


def run_searches(campaign: Campaign, loss: Callable[[float, float], float | None]) -> tuple[list[Planned], Outcomes]:
    """The plan when every trial has ended, one at a time, with the loss of its learning rate and its warm-up."""
    ended: dict[str, Ended] = {}
    while True:
        planned = plan(campaign, ended.get)
        open_jobs = [run.job for run in planned if run.phase == "search" and run.job and run.job.id not in ended]
        if not open_jobs:
            return planned, ended.get
        job = open_jobs[0]
        training, entry = job.config.training, job.config.method.entry
        found = loss(training.rate_of(entry), training.warmup_of(entry))
        diverged = Failure(reason="diverged", message="loss nan.")
        ended[job.id] = diverged if found is None else scored(held_out_loss=found)


def test_a_study_of_the_default_method_is_searched_by_the_grid_of_that_method(tmp_path: Path) -> None:
    grids = [{"for": ["fcca"], "warmup": [0.03, 0.1]}, {"for": ["eva"], "warmup": [0.2, 0.3, 0.4]}]
    study = {"axes": {}, "search": {"grids": grids}, "report": {"columns": ["seed"]}}
    planned = plan(campaign_of(tmp_path, main=study), unknown)
    assert [run.axes.get("warmup") for run in planned if run.phase == "search"] == [0.03, 0.1]


@pytest.mark.parametrize(("rates", "best"), [([1e-3, 2e-3], 8e-3), ([3e-2, 1e-1], 0.0075), ([2e-3, 4e-3, 8e-3], 4e-3)])
def test_a_search_finds_a_best_rate_that_is_planted_outside_its_grid(
    rates: list[float], best: float, tmp_path: Path
) -> None:
    campaign = searched(tmp_path, rates)
    planned, outcome = run_searches(campaign, lambda rate, warmup: abs(math.log(rate / best)) + warmup)
    finals = [run.job.config for run in planned if run.phase == "final" and run.job]
    assert [(config.training.learning_rate, config.training.warmup, config.rows.seed) for config in finals] == [
        (best, 0.03, 42), (best, 0.03, 43)
    ]  # fmt: skip
    ((_, _, choice),) = choices(campaign, outcome)
    assert choice.beyond is None
    assert tally(planned, SimpleNamespace(outcome=outcome)).waiting == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("search", "num_added"), [({}, 4), ({"beyond": 2}, 2), ({"beyond": 0}, 0)])
def test_a_search_that_only_gets_better_ends_after_as_many_more_and_is_marked(
    search: dict[str, int], num_added: int, tmp_path: Path
) -> None:
    campaign = searched(tmp_path, [1e-3, 2e-3], **search)
    planned, outcome = run_searches(campaign, lambda rate, warmup: -rate - warmup)
    trials = [run.axes for run in planned if run.phase == "search"]
    assert [(trial["learning_rate"], trial["warmup"]) for trial in trials[4:]] == [
        (2e-3 * 2**n, 0.1) for n in range(1, num_added + 1)
    ]
    ((_, _, choice),) = choices(campaign, outcome)
    assert choice.options == {"learning_rate": 2e-3 * 2**num_added, "warmup": 0.1}
    assert choice.beyond == 2e-3 * 2 ** (num_added + 1)


def test_a_rate_beyond_which_training_diverges_is_no_end(tmp_path: Path) -> None:
    campaign = searched(tmp_path, [1e-3, 2e-3])
    planned, outcome = run_searches(campaign, lambda rate, _: None if rate > 4e-3 else -rate)
    ((_, _, choice),) = choices(campaign, outcome)
    assert (choice.options["learning_rate"], choice.beyond) == (4e-3, None)
    assert len([run for run in planned if run.phase == "search"]) == 6
    assert most_further_trials(campaign, outcome) == 0


def test_a_trial_that_failed_for_another_reason_than_its_rate_bounds_no_search(tmp_path: Path) -> None:
    campaign = searched(tmp_path, [1e-3, 2e-3, 4e-3])

    def outcome(run_id: str) -> Ended:
        rate = rates[run_id]
        return Failure(reason="worker died", message="gone") if rate == 4e-3 else scored(held_out_loss=-rate)

    trials = [run for run in plan(campaign, unknown) if run.phase == "search" and run.job]
    rates = {run.job.id: run.axes["learning_rate"] for run in trials if run.job}
    ((_, _, choice),) = choices(campaign, outcome)
    assert (choice.options["learning_rate"], choice.beyond) == (2e-3, 4e-3)  # marked, and not made once more
    assert len([run for run in plan(campaign, outcome) if run.phase == "search"]) == len(trials)


@pytest.mark.parametrize("seed", [-1, "43", 1.5, 99999999999])
def test_a_wrong_seed_is_refused_before_a_search(seed: object, tmp_path: Path) -> None:
    study = {"axes": {"method": ["fcca"], "seed": [42, seed]}, "search": {"grids": [{"learning_rate": [1e-3, 2e-3]}]}}
    with pytest.raises(ConfigError, match="Study 'main': .*seed must be"):
        plan(campaign_of(tmp_path, main=study), unknown)


def test_final_runs_wait_while_a_search_goes_on(tmp_path: Path) -> None:
    campaign = searched(tmp_path, [1e-3, 2e-3])
    of_grid = [run.job for run in plan(campaign, unknown) if run.phase == "search" and run.job]
    ended = {job.id: scored(held_out_loss=-job.config.training.learning_rate) for job in of_grid}
    planned = plan(campaign, ended.get)
    assert len([run for run in planned if run.phase == "search"]) == len(of_grid) + 1
    assert (most_further_trials(campaign, unknown), most_further_trials(campaign, ended.get)) == (4, 3)
    assert all(run.job is None for run in planned if run.phase == "final")
    assert planned == plan(campaign, ended.get)  # a second look, or another process, sees the same


def test_moments_are_shared_by_methods_and_learning_rates_but_not_by_seeds_or_rows() -> None:
    key = moments_key(make_job("tune", OPTIONS).config)
    for same in ({"method": "eva"}, {"learning_rate": 1e-3}, {"rank": 4}, {"damping": 1.0}):
        assert moments_key(make_job("tune", {**OPTIONS, **same}).config) == key
    for other in ({"seed": 43}, {"calibration_size": 64}, {"num_train": 9}, {"tokens": "completion"}):
        assert moments_key(make_job("tune", {**OPTIONS, **other}).config) != key


def test_moments_of_a_calibration_task_are_shared_by_all_tasks_that_are_learned() -> None:
    elsewhere = {**OPTIONS, "calibration_task": "pocket-sentiment"}
    key = moments_key(make_job("tune", elsewhere).config)
    for same in ({"task": "pocket-comparison"}, {"num_train": 9}, {"num_evaluation": 5}):
        assert moments_key(make_job("tune", {**elsewhere, **same}).config) == key
    assert moments_key(make_job("tune", {**elsewhere, "seed": 43}).config) != key
    assert moments_key(make_job("tune", OPTIONS).config) != key


def test_where_one_method_reads_g_every_run_with_bases_on_that_model_is_measured_on_g_a_and_d() -> None:
    def wanted(jobs: list[Job]) -> set[frozenset[str]]:
        return set(needs_of(jobs).values())

    eva, free, lora = (make_job("tune", {**OPTIONS, "method": method}) for method in ("eva", "milora", "lora"))
    assert wanted([eva, free, lora]) == {frozenset({"input_outer"})}
    reads = make_job("tune", {**OPTIONS, "method": "signgrad", "seed": 43})  # another seed: other rows
    gad = frozenset({"cross", "input_square", "error_square"})
    assert wanted([eva, reads]) == {gad | {"input_outer"}, gad}
    assert needs_of([lora, free, reads]) == needs_of([reads, free]) == dict.fromkeys(needs_of([free, reads]), gad)
    assert moments_key(free.config) in needs_of([free, reads])
    assert moments_key(lora.config) not in needs_of([lora, reads])
    for elsewhere in (
        make_job("profile", {**OPTIONS, "method": "fcca"}),
        make_job("tune", {**OPTIONS, "method": "fcca", "model": "another"}),
    ):
        assert not needs_of([free, elsewhere]).get(moments_key(free.config))


PRESETS = sorted((LAB / "campaigns").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_can_be_planned(preset: Path) -> None:
    campaign = read_campaign(preset)
    assert campaign.name == preset.stem
    assert {run.study for run in plan(campaign, lambda _: None)} == set(campaign.studies)


def test_the_schema_says_of_every_option_what_it_allows_its_default_and_its_help() -> None:
    schema = Campaign.model_json_schema()
    base = schema["properties"]["base"]["properties"]
    expected = {name for name in run_options() if name not in PLACES} | ALIASES.keys()
    holders = [CalibrationOptions, *(row.options for row in CONSTRUCTORS.values())]
    assert expected >= {COMMAND_NAMES.get(name, name) for holder in holders for name in options_of(holder)}
    assert base.keys() == expected
    assert all(option["description"] for option in base.values())
    assert base["whiten"] == {
        "enum": ["both", "input", "output", "none"], "type": "string", "default": "both",
        "description": "fcca: Sides that are whitened.",
    }  # fmt: skip
    assert [kind["type"] for kind in base["damping"]["anyOf"]] == ["number", "array"]
    assert base["damping"]["anyOf"][1]["minItems"] == base["damping"]["anyOf"][1]["maxItems"] == 2
    assert (base["group_size"]["minimum"], base["group_size"]["default"]) == (1, 999)
    study = schema["$defs"]["Study"]["properties"]
    assert study["fixed"]["properties"] == base
    lists = {name: {"type": "array", "items": option, "minItems": 1} for name, option in base.items()}
    grid = schema["$defs"]["Search"]["properties"]["grids"]["items"]["properties"]
    assert study["axes"]["properties"] == lists
    assert grid == lists | {"for": {"type": "array", "items": {"type": "string"}, "minItems": 1}}


def test_a_specification_is_written_with_the_names_and_read_with_the_kinds(tmp_path: Path) -> None:
    campaign = read_campaign(write_spec(tmp_path))
    kinds = {name: study.kind for name, study in campaign.studies.items()}
    assert kinds == {"main": KINDS["tune"], "stability": KINDS["stability"]}
    written = campaign.model_dump(mode="json")["studies"]
    assert {name: study["kind"] for name, study in written.items()} == {"main": "tune", "stability": "stability"}
    assert Campaign.model_validate_json(campaign.model_dump_json(), strict=True) == campaign
    schema = Campaign.model_json_schema()["$defs"]["Study"]["properties"]["kind"]
    assert schema == {"default": "tune", "enum": list(KINDS), "title": "Kind", "type": "string"}
