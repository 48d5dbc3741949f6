"""``--method auto`` and ``--damping auto``: the run that is made is the one that names what was chosen."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from frozencore.adapter.advice.advise import Advice, advise
from frozencore.adapter.own_constructor import register_constructor
from frozencore.cli.tables import run_summary
from frozencore.constructors import CONSTRUCTORS
from frozencore.errors import ConfigError
from frozencore.lab.campaign.company import company_keys
from frozencore.lab.campaign.job import make_job
from frozencore.lab.campaign.plan import plan
from frozencore.lab.campaign.shared import SharedWork, needs_of
from frozencore.lab.campaign.spec import read_campaign
from frozencore.lab.campaign.stability import Calibrated, compare_bases
from frozencore.lab.campaign.store import Store
from frozencore.lab.campaign.worker import Place, Worker
from frozencore.lab.methods import METHODS
from frozencore.lab.run import choosing
from frozencore.lab.run.bench import calibration_batches, prepare
from frozencore.lab.run.calibrating import execute_calibration
from frozencore.lab.run.choosing import settings_to_compare
from frozencore.lab.run.execute import execute
from frozencore.lab.run.interrupted import kept_of
from frozencore.lab.run.record import TunedRecord
from lab.run.test_execute import config_of, silent
from small_campaign import write_spec

ASKING = """
name: asking
models: {pocket: pocket}
base: {rank: 4, calibration_size: 16, batch_size: 8, accumulation: 1, epochs: 1, num_train: 16, num_evaluation: 4}
studies:
  main:
    title: What the rows speak for
    axes: {model: [pocket], task: [pocket-sentiment], method: [auto], seed: [42]}
    fuse: true
"""
FEW = {"num_train": 16, "num_evaluation": 4}
Run = tuple[Path, TunedRecord]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that leaves its method open; only read."""
    out = tmp_path_factory.mktemp("auto") / "run"
    return out, execute(config_of(method="auto", **FEW), out, silent)


@pytest.fixture(scope="module")
def advice() -> Advice:
    """What its rows say, asked in Python."""
    bench = prepare(config_of(**FEW), silent)
    batches = calibration_batches(bench.rows, bench.encoder.pad_id)
    return advise(bench.model, batches, r=4, seed=42, only_bases=True, progress=False)


def of_files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "adapter").iterdir())}


def test_a_run_that_chooses_is_the_run_that_names_what_it_chose(chosen: Run, tmp_path: Path) -> None:
    out, record = chosen
    assert record.choice is not None
    assert (record.choice.asked, record.choice.rows) == (("method",), 16)
    named = config_of(method=record.choice.method, core=record.choice.options, **FEW)
    other = execute(named, tmp_path / "named", silent)
    assert of_files(out) == of_files(tmp_path / "named")
    assert record.held_out_loss == other.held_out_loss
    written = json.loads((out / "result.json").read_text())
    assert written["config"] == json.loads((tmp_path / "named" / "result.json").read_text())["config"]
    assert (written["method"], written["choice"]["method"]) == (record.choice.method,) * 2
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["constructor"] == record.choice.method != "auto"
    assert not other.has("choice")


def test_it_chooses_what_advice_on_its_rows_would_and_keeps_fcca_where_that_is_level(
    chosen: Run, advice: Advice
) -> None:
    choice = chosen[1].choice
    assert choice is not None
    assert [(one.method, one.options, one.gain) for one in choice.compared] == [
        (worth.setting.method, worth.setting.options, worth.gain) for worth in advice.bases
    ]
    assert (choice.method, choice.gain) == (advice.best_bases.setting.method, advice.best_bases.gain)
    fcca = next(one.gain for one in choice.compared if (one.method, one.options) == ("fcca", {}))
    best = max(one.gain for one in choice.compared)
    assert (choice.method == "fcca" and not choice.options) == (fcca >= best - 0.02 * abs(best))


def test_damping_alone_is_chosen_for_the_metric_that_was_named(tmp_path: Path) -> None:
    config = config_of(core={"damping": "auto", "whiten": "input"}, **FEW)
    record = execute(config, tmp_path / "run", silent)
    assert record.choice is not None
    options = [one.options for one in record.choice.compared]
    assert sorted(one.get("damping", 1e-3) for one in options) == [1e-3, 0.1, 10.0]
    assert all(one["whiten"] == "input" for one in options)
    core = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (core["damping"], core["whiten"]) == (record.config.core["damping"], "input")
    assert record.config.core["damping"] == record.choice.options.get("damping", 1e-3)


def test_a_run_that_is_resumed_does_not_ask_again(
    advice: Advice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(method="auto", **FEW)
    last = replace(advice.bases[-1], gain=1.0)  # which asking again would not choose

    def killed(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(choosing, "advise_run", lambda *_, **__: replace(advice, bases=(last,), kept=last))
    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path / "run", silent, train=killed)
    assert kept_of(tmp_path / "run") in ("its bases", "the choice of its bases")
    monkeypatch.setattr(choosing, "advise_run", killed)
    record = execute(config, tmp_path / "run", silent, resume=True)
    assert record.choice is not None
    assert record.method == record.choice.method == last.setting.method != advice.best_bases.setting.method


def test_a_run_of_a_campaign_chooses_too_and_its_record_holds_what(
    chosen: Run, advice: Advice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = read_campaign(write_spec(tmp_path, ASKING))
    (planned,) = plan(campaign, lambda _: None)
    job = planned.job
    assert job is not None
    assert company_keys(campaign, [planned]) == {}  # it does not know which basis it would share
    monkeypatch.setattr(choosing, "advise_run", lambda *_, **__: advice)
    store = Store(tmp_path / "campaign")
    assert Worker(store, Place()).run(job, SharedWork(store, needs_of([job])), silent)
    outcome = store.outcome(job.id)
    assert outcome is not None
    record = outcome.record
    assert isinstance(record, TunedRecord)
    assert record.choice is not None
    assert (record.method, record.config.content()["method"]) == (chosen[1].method,) * 2
    assert record.held_out_loss == pytest.approx(chosen[1].held_out_loss, abs=1e-5)


def test_a_run_in_rounds_chooses_among_bases_that_read_data() -> None:
    methods = {setting.method for setting in settings_to_compare(config_of(method="auto", refresh=2))}
    assert methods == {"fcca", "rawgrad", "signgrad", "filora", "eva"}


def test_the_screen_says_in_a_line_what_was_chosen_and_from_what(chosen: Run) -> None:
    record = chosen[1]
    assert record.choice is not None
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(run_summary(record))
    line = next(line for line in console.export_text().splitlines() if line.startswith("Bases: "))
    assert line.startswith(f"Bases: {METHODS[record.method].label}")
    assert ", chosen from 13 by what a first step gains on rows that it has not seen: " in line
    assert f"{record.choice.gain:.4f} of {record.choice.loss:.3f} nats" in line
    assert "16 rows" in line


def test_a_dry_run_says_that_it_will_be_chosen_and_writes_nothing(command: Command, tmp_path: Path) -> None:
    words = ["tune", "--model", "pocket", "--task", "pocket-sentiment", "--method", "auto", "--damping", "auto"]
    status, out, err = command(*words, "--num-train", 16, "--output", tmp_path / "run", "--dry-run")
    assert status == 0, err
    assert "--method auto --damping auto: the run chooses its bases from 13 by its calibration rows" in out
    assert "method: auto" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "auto", "core": {"whiten": "input"}}, "whiten input is for fcca: name one with --method, or leave"),
        ({"method": "lora", "core": {"damping": "auto"}}, "'lora' does not read damping"),
        ({"method": "auto", "basis": "there"}, "The bases in there are chosen: leave --method auto out"),
        ({"core": {"damping": "auto"}, "memory_budget": "1GB"}, "^--damping auto compares bases by dense second mom"),
    ],
)
def test_where_nothing_can_be_chosen_one_line_says_so(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(**options)


def test_what_many_runs_share_is_not_left_open(tmp_path: Path) -> None:
    config = config_of(method="auto", **FEW)
    with pytest.raises(ConfigError, match=r"^--method auto is chosen by a run of `frozencore tune` for itself"):
        execute_calibration(config, tmp_path / "calibrated", silent)
    bench: Any = None
    with pytest.raises(ConfigError, match="but this is a comparison of bases"):
        compare_bases(Calibrated(config, bench), Calibrated(config, bench), 8, bench, silent)
    with pytest.raises(ConfigError, match="leave --moments out, or name what to train"):
        execute(config, tmp_path / "run", silent, moments_file=tmp_path / "moments.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_constructor_of_ones_own_is_compared_and_none_may_be_called_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONSTRUCTORS, "mine", replace(CONSTRUCTORS["rawgrad"], label="Mine"))
    assert "mine" in [setting.method for setting in settings_to_compare(config_of(method="auto"))]
    with pytest.raises(ConfigError, match="'auto' is taken"):
        register_constructor("auto", CONSTRUCTORS["rawgrad"])


def test_an_open_run_has_an_id_of_its_own_and_others_keep_theirs() -> None:
    named = {"model": "pocket", "task": "pocket-sentiment"}
    ids = {make_job("tune", {**named, **more}).id for more in ({}, {"method": "auto"}, {"damping": "auto"})}
    assert len(ids) == 3
    assert make_job("tune", {**named, "method": "fcca", "damping": 1e-3}).id == make_job("tune", named).id
