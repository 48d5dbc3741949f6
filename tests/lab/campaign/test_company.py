"""Runs that train in company against the same runs alone: the same ids, losses, predictions and adapters."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from frozencore.lab.campaign.company import company_folder, company_keys, company_sizes
from frozencore.lab.campaign.crew import Event, OwnProcess
from frozencore.lab.campaign.drive import drive
from frozencore.lab.campaign.job import Job, make_job
from frozencore.lab.campaign.plan import plan
from frozencore.lab.campaign.shared import Needs, SharedWork
from frozencore.lab.campaign.spec import Campaign, read_campaign
from frozencore.lab.campaign.store import Store
from frozencore.lab.campaign.worker import Place, Worker
from frozencore.lab.run.record import TunedRecord
from frozencore.lab.training.checkpoints import seal_checkpoint
from small_campaign import write_spec

SPEC = """
name: sweep
models: {pocket: pocket}
base:
  {batch_size: 4, accumulation: 1, dtype: float32, num_train: 16, num_evaluation: 8, epochs: 2, calibration_size: 8,
   select_checkpoint: epoch}
keep_adapters: true
studies:
  rates:
    title: Learning rates on one basis, one of which diverges and some of which stop early
    fuse: FUSE
    fixed: {select_checkpoint: 1, patience: 1}
    axes: {model: [pocket], task: [pocket-sentiment], method: [fcca], learning_rate: [1e-3, 1e38, 4.0], seed: [42]}
    report: {columns: [learning_rate]}
  seeds:
    title: Seeds on bases of the weights
    fuse: FUSE
    axes: {model: [pocket], task: [pocket-sentiment], method: [milora], seed: [42, 43]}
  alone:
    title: What trains no core
    fuse: FUSE
    fixed: {num_train: 4, epochs: 1}
    axes: {model: [pocket], task: [pocket-sentiment], method: [lora], seed: [42]}
"""


def campaign_in(folder: Path, *, fuse: bool) -> Campaign:
    return read_campaign(write_spec(folder, SPEC.replace("FUSE", str(fuse).lower())))


def made(folder: Path, *, fuse: bool) -> Store:
    store = Store(folder / "out")
    crew = OwnProcess(Worker(store, Place(), keep_adapters=True))
    standing = drive(campaign_in(folder, fuse=fuse), store, crew, lambda *_: None)
    assert (standing.finished, standing.failed, standing.left) == (5, 1, 0)
    return Store(folder / "out")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return made(tmp_path_factory.mktemp("alone"), fuse=False)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return made(tmp_path_factory.mktemp("fused"), fuse=True)


def records(store: Store) -> dict[str, TunedRecord]:
    found = {file.parent.name: store.outcome(file.parent.name) for file in store.runs.glob("*/result.json")}
    return {run_id: outcome.record for run_id, outcome in found.items()}  # type: ignore[union-attr,misc]


def test_a_fused_run_is_the_run_alone(alone: Store, fused: Store) -> None:
    ours, theirs = records(fused), records(alone)
    assert ours.keys() == theirs.keys()
    for run_id, one in ours.items():
        other = theirs[run_id]
        assert one.training.losses == pytest.approx(other.training.losses, rel=1e-5)
        assert one.held_out_loss == pytest.approx(other.held_out_loss, rel=1e-5)
        assert (one.accuracy, one.hashes, one.config) == (other.accuracy, other.hashes, other.config)
        assert one.selection is not None
        assert other.selection is not None
        assert one.selection.kept_step == other.selection.kept_step
        assert one.selection.stopped_early == other.selection.stopped_early
        assert [score.accuracy for score in one.selection.scores] == [s.accuracy for s in other.selection.scores]
        files = [store.runs / run_id / "predictions.jsonl" for store in (fused, alone)]
        assert [json.loads(line)["correct"] for line in files[0].open()] == [
            json.loads(line)["correct"] for line in files[1].open()
        ]
        saved = [load_file(s.runs / run_id / "adapter" / "adapter_model.safetensors") for s in (fused, alone)]
        assert saved[0].keys() == saved[1].keys()
        for name, tensor in saved[0].items():
            assert (tensor - saved[1][name]).norm() <= 1e-4 * saved[1][name].norm() + 1e-9, name
    stopped = [run_id for run_id, one in ours.items() if one.selection is not None and one.selection.stopped_early]
    assert stopped
    assert all(ours[run_id].training.num_steps < 8 for run_id in stopped)


def test_a_record_says_in_what_company_its_run_trained(alone: Store, fused: Store) -> None:
    sizes = sorted((one.method, one.company and one.company.tenants) for one in records(fused).values())
    assert sizes == [("fcca", 3)] * 2 + [("lora", None)] + [("milora", 2)] * 2
    assert {one.company for one in records(alone).values()} == {None}
    for one in records(fused).values():
        assert one.resources is not None
        assert (one.resources.peaks is None) == (one.company is not None)


def test_one_that_diverges_fails_as_it_would_alone_and_takes_nobody_along(alone: Store, fused: Store) -> None:
    told = []
    for store in (alone, fused):
        (folder,) = store.failed.iterdir()
        outcome = store.outcome(folder.name)
        assert outcome is not None
        assert outcome.failure is not None
        assert outcome.failure.reason == "diverged"
        told.append((folder.name, outcome.failure.message.split(":")[0]))
    assert told[0] == told[1]


@pytest.mark.parametrize("own", ["report_to: [tensorboard]", "padding_free: true"])
def test_what_a_company_would_leave_out_goes_alone(own: str, tmp_path: Path) -> None:
    text = SPEC.replace("FUSE", "true").replace("base:\n  {", f"base:\n  {{{own}, ")
    campaign = read_campaign(write_spec(tmp_path, text))
    assert company_keys(campaign, plan(campaign, lambda _: None)) == {}


def test_nothing_of_a_company_is_left(fused: Store) -> None:
    assert not [path for path in (fused.shared / "company").rglob("*") if path.is_file()]


class StoppedError(BaseException):
    """As a kill: no worker takes it for a failure of its run."""


@pytest.mark.parametrize(("stage", "done"), [pytest.param("train", 5, marks=pytest.mark.slow), ("score", 1)])
def test_a_company_that_is_killed_goes_on(fused: Store, tmp_path: Path, stage: str, done: int) -> None:
    """In its training, and when the first of its runs is scored."""
    campaign = campaign_in(tmp_path, fuse=True)
    campaign = campaign.model_copy(update={"studies": {"rates": campaign.studies["rates"]}})
    jobs = [run.job for run in plan(campaign, lambda _: None) if run.job]
    store = Store(tmp_path / "out")
    store.open(campaign)
    worker = Worker(store, Place())

    def stop(told: str, at: int, total: int | None, note: str = "") -> None:
        if told == stage and at >= done:
            raise StoppedError

    with pytest.raises(StoppedError):
        worker.run(replace(jobs[0], company=tuple(jobs[1:])), SharedWork(store), stop)
    assert not records(store)
    there = [path for path in (store.shared / "company").rglob("*.safetensors") if path.parent.name == "company"]
    assert len(there) == (3 if stage == "score" else 0)
    drive(campaign, store, OwnProcess(Worker(store, Place())), lambda *_: None)
    for run_id, one in records(Store(tmp_path / "out")).items():
        assert one.training.losses == records(fused)[run_id].training.losses
        assert one.held_out_loss == records(fused)[run_id].held_out_loss
    logs = "".join(log.read_text() for log in store.folder.glob("*/*/log.txt"))
    trained = [line for line in logs.splitlines() if line.startswith("train ")]
    assert len([line for line in trained if line.startswith("train 24/24")]) == 1  # its last step, once


class Hired:
    """Two workers who do nothing, and the runs that they were given."""

    size = 2

    def __init__(self) -> None:
        self.given: list[tuple[int, Job]] = []
        self.busy: list[int] = []

    def start(self, worker: int, job: Job, needs: Needs) -> None:
        self.given.append((worker, job))
        self.busy.append(worker)

    def events(self, timeout_s: float) -> Sequence[Event]:
        return [Event(self.busy.pop(0), "finished")]

    def close(self) -> None:
        """There is nothing to end."""


def test_no_other_worker_takes_a_run_that_is_in_training(tmp_path: Path) -> None:
    crew = Hired()
    drive(campaign_in(tmp_path, fuse=True), Store(tmp_path / "out"), crew, lambda *_: None)
    given = [(worker, job.config.method, len(job.company)) for worker, job in crew.given]
    assert given[:2] == [(0, "fcca", 2), (1, "milora", 1)]
    assert sorted(method for _, method, _ in given) == ["fcca"] * 3 + ["lora"] + ["milora"] * 2
    assert {others for _, _, others in given[2:]} == {0}
    assert given[2][0] == 0  # the worker that was free first
    assert given[2][1] == "fcca"


def keys_of(campaign: Campaign, *options: Mapping[str, object]) -> list[str | None]:
    base = {**campaign.base, "model": "pocket", "task": "pocket-sentiment", "method": "fcca"}
    study = next(iter(campaign.studies))
    planned = [replace(plan(campaign, lambda _: None)[0], study=study, job=job) for job in map_jobs(base, options)]
    keys = company_keys(campaign, planned)
    return [keys.get(run.job.id) for run in planned if run.job]


def map_jobs(base: Mapping[str, object], options: Sequence[Mapping[str, object]]) -> list[Job]:
    return [make_job("tune", {**base, **one}) for one in options]


def test_a_refreshed_run_trains_alone_since_it_leaves_the_basis(tmp_path: Path) -> None:
    plain, twice, auto = keys_of(
        campaign_in(tmp_path, fuse=True),
        *({"refresh": rounds, "select_checkpoint": "none"} for rounds in (1, 2, "auto")),
    )
    assert plain is not None
    assert (twice, auto) == (None, None)


def test_what_may_train_in_company_shares_all_that_its_basis_and_rows_are_of(tmp_path: Path) -> None:
    campaign = campaign_in(tmp_path, fuse=True)
    plain, rate, warmup, batch, seed, rank, size, rows, lora = keys_of(
        campaign,
        {},
        {"learning_rate": 1e-4},
        {"warmup": 0.5},
        {"batch_size": 2, "epochs": 3},
        {"seed": 43},
        {"rank": 4},
        {"calibration_size": 16},
        {"num_train": 12},
        {"method": "lora"},
    )
    assert plain == rate == warmup == batch
    assert len({plain, seed, rank, size, rows}) == 5
    assert lora is None
    weights = {"method": "lora_xs"}
    assert len(set(keys_of(campaign, weights, weights | {"seed": 43}))) == 1
    drawn = {"method": "random"}
    assert len(set(keys_of(campaign, drawn, drawn | {"seed": 43}))) == 2
    assert keys_of(campaign_in(tmp_path, fuse=False), {}, {"learning_rate": 1e-4}) == [None, None]


def test_sizes_are_of_the_runs_that_are_left() -> None:
    keys = {"a": "x", "b": "x", "c": "x", "d": "y"}
    assert company_sizes(keys, "abcde") == {"a": 3, "b": 3, "c": 3}
    assert company_sizes(keys, "abd") == {"a": 2, "b": 2}


def test_a_training_that_fails_as_a_whole_fails_its_first_run_and_the_others_go_alone(tmp_path: Path) -> None:
    campaign = campaign_in(tmp_path, fuse=True)
    campaign = campaign.model_copy(update={"studies": {"seeds": campaign.studies["seeds"]}})
    first, other = (run.job for run in plan(campaign, lambda _: None) if run.job)
    store = Store(tmp_path / "out")
    planted = company_folder(store, [first.id, other.id]) / "checkpoint-1"
    planted.mkdir(parents=True)
    seal_checkpoint(planted, {"base model": "another"})
    standing = drive(campaign, store, OwnProcess(Worker(store, Place())), lambda *_: None)
    assert (standing.finished, standing.failed) == (1, 1)
    failed = Store(tmp_path / "out").outcome(first.id)
    assert failed is not None
    assert failed.failure is not None
    assert "was made with others: base model another" in failed.failure.message
    assert records(Store(tmp_path / "out"))[other.id].company is None


def test_a_run_and_its_company_reach_another_process_as_they_are(tmp_path: Path) -> None:
    jobs = [run.job for run in plan(campaign_in(tmp_path, fuse=True), lambda _: None) if run.job]
    sent = pickle.loads(pickle.dumps(replace(jobs[0], company=tuple(jobs[1:]))))
    assert sent == jobs[0]
    assert [other.id for other in sent.company] == [job.id for job in jobs[1:]]
