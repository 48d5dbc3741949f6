"""A small campaign from specification to results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import ArtifactError
from frozencore.tune.config import make_config
from frozencore.tune.run import execute
from frozencore_lab.campaign.driver import MOST_DEATHS, drive
from frozencore_lab.campaign.job import Job, Place
from frozencore_lab.campaign.results import CampaignResults, Tally, load_results
from frozencore_lab.campaign.shared_moments import Needs
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Worker
from frozencore_lab.campaign.worker_pool import Event, OwnProcess
from small_campaign import write_spec
from small_runs import record_content


def run_small(folder: Path, spec: Path) -> Tally:
    store = Store(folder)
    campaign = read_campaign(spec)
    store.open(campaign)
    return drive(campaign, store, OwnProcess(Worker(store, Place())), lambda *_: None)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tally]:
    folder = tmp_path_factory.mktemp("campaign")
    return folder / "out", run_small(folder / "out", write_spec(folder))


@pytest.fixture
def results(done: tuple[Path, Tally]) -> CampaignResults:
    return load_results(done[0])


def test_everything_is_run_once_and_search_goes_first(done: tuple[Path, Tally], results: CampaignResults) -> None:
    folder, standing = done
    assert standing == Tally(finished=4 + 6 + 2, failed=0, ready=0, waiting=0)
    assert len(list((folder / "runs").glob("*/result.json"))) == standing.finished
    main, _ = results.studies
    assert [run.axes["method"] for run in main.runs] == ["fcca"] * 2 + ["eva"] * 2 + ["milora"] * 2
    assert all(run.record for run in main.runs)
    assert len(main.choices) == 2


def test_a_campaigns_run_is_the_run_that_tune_makes(results: CampaignResults, tmp_path: Path) -> None:
    """Shared moments, a base model that other runs have used, and shared weight bases change nothing."""
    for run in results.studies[0].runs[1::2]:
        config = make_config(**run.record.config.content())
        alone = execute(config, tmp_path / config.method.name, lambda *_: None)
        for key in ("hashes", "accuracy", "held_out_loss", "held_out_loss_before"):
            assert getattr(run.record, key) == getattr(alone, key), (config.method.name, key)
        assert run.record.training.losses == alone.training.losses


def test_what_runs_share_is_computed_once(done: tuple[Path, Tally]) -> None:
    shared = done[0] / "shared"
    # 16 rows under seeds 42 and 43; 8 and 24 rows of the stability study
    assert len(list((shared / "moments").glob("*.safetensors"))) == 4
    assert len(list((shared / "weight-bases").glob("*/basis.safetensors"))) == 1


def test_stability_compares_with_the_reference(results: CampaignResults) -> None:
    few, all_of_them = (run.record for run in results.studies[1].runs)
    assert 0.3 < few.cosine_P < 0.999
    assert 0.3 < few.cosine_Q < 0.999
    assert all_of_them.cosine_P == pytest.approx(1.0, abs=1e-6)
    assert all_of_them.cosine_Q == pytest.approx(1.0, abs=1e-6)


def test_a_second_driver_finds_nothing_to_do(done: tuple[Path, Tally], tmp_path: Path) -> None:
    folder, standing = done
    times = {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/result.json")}
    assert run_small(folder, write_spec(tmp_path)) == standing
    assert {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/result.json")} == times


def test_results_are_read_from_the_index_alone(
    done: tuple[Path, Tally], results: CampaignResults, tmp_path: Path
) -> None:
    for name in ("campaign.json", "records.jsonl"):
        (tmp_path / name).write_bytes((done[0] / name).read_bytes())
    assert load_results(tmp_path) == results
    (tmp_path / "records.jsonl").write_text('{"run_id": "0123\n', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"line 1 is damaged or of a newer frozencore, and its run is not in runs"):
        load_results(tmp_path)


DIFFERENT: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "weights": (("hashes", "model"), "0" * 64, "the weights of"),
    "train": (("hashes", "train"), "0" * 64, "the train rows"),
    "evaluation": (("hashes", "evaluation"), "0" * 64, "the evaluation rows"),
    "choices": (("hashes", "choices"), "0" * 64, "the choices rows"),
    "steps": (("provenance", "steps_version"), 1, "the version of the training's steps"),
    "default": (("config", "prompt_style"), "plain", "the default of prompt_style"),
    "default of a group": (("config", "calibration", "weighting"), "token_sum", "the default of calibration.weighting"),
}


def altered(done: tuple[Path, Tally], folder: Path, *path: str, to: Any, also: dict[str, Any] | None = None) -> Path:
    """A copy of the campaign's records in which the first one that has a value there has another."""
    (folder / "campaign.json").write_bytes((done[0] / "campaign.json").read_bytes())
    records = [json.loads(line) for line in (done[0] / "records.jsonl").read_text().splitlines()]
    parts = [reduce(lambda part, key: (part or {}).get(key), path[:-1], record) for record in records]
    first = next(i for i, part in enumerate(parts) if part and part.get(path[-1]))
    parts[first][path[-1]] = to
    records[first]["hashes"] = records[first].get("hashes", {}) | (also or {})
    (folder / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return folder


@pytest.mark.parametrize("what", DIFFERENT)
def test_runs_that_do_not_differ_by_their_axes_alone_are_refused(
    what: str, done: tuple[Path, Tally], tmp_path: Path
) -> None:
    path, value, said = DIFFERENT[what]
    folder = altered(done, tmp_path, *path, to=value)
    with pytest.raises(ArtifactError, match=rf"differ in {said}.*Remove"):
        load_results(folder)
    if what == "steps":  # nor are runs added to them
        with pytest.raises(ArtifactError, match=r"differ in the version of the training's steps.*another --out"):
            run_small(folder, write_spec(tmp_path))


def test_runs_of_one_model_in_two_dtypes_stand_beside_one_another(done: tuple[Path, Tally], tmp_path: Path) -> None:
    folder = altered(done, tmp_path, "config", "dtype", to="bfloat16", also={"model": "0" * 64})
    assert all(run.record for run in load_results(folder).studies[0].runs)


def test_a_run_that_was_removed_is_gone_from_the_index_and_one_made_elsewhere_is_not(
    done: tuple[Path, Tally], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    first, second, *_ = sorted(path.name for path in (out / "runs").iterdir() if not path.name.startswith("."))
    shutil.rmtree(out / "runs" / first)
    shutil.rmtree(out / "runs" / second)
    (out / "locks" / f"run-{second}").unlink()  # as in a folder that came with its index alone
    Store(out).write_index()
    assert (Store(out).outcome(first), Store(out).outcome(second) is None) == (None, False)
    assert first not in (out / "records.jsonl").read_text()
    assert second in (out / "records.jsonl").read_text()


PROFILED = """
name: profiled
models: {pocket: pocket}
studies:
  speed:
    title: Alone on the machine
    kind: profile
    axes: {model: [pocket], task: [pocket-math], method: [fcca, eva], seed: [42]}
  main:
    title: Side by side
    axes: {model: [pocket], task: [pocket-math], method: [fcca, eva, random], seed: [42]}
"""


class NotedPool:
    """Workers that end every run in one way, and note what ran beside what."""

    def __init__(self, store: Store, size: int = 2, end: str = "finished") -> None:
        self.size = size
        self.beside: list[set[str]] = []
        self.started: list[str] = []
        self.is_closed = False
        self._store = store
        self._end = end
        self._jobs: dict[int, Job] = {}

    def start(self, worker: int, job: Job, needs: Needs) -> None:
        self._jobs[worker] = job
        self.started.append(job.id)
        self.beside.append({each.kind.name for each in self._jobs.values()} | {f"{len(self._jobs)} at once"})

    def events(self, timeout_s: float) -> Sequence[Event]:
        worker, job = self._jobs.popitem()
        if self._end == "finished":
            with self._store.running(job.id) as folder:
                (folder / "result.json").write_text(json.dumps(record_content({"task": "pocket-math"})))
        return [Event(worker, self._end, message="the disk is full")]  # type: ignore[arg-type]

    def close(self) -> None:
        self.is_closed = True


def test_what_is_profiled_runs_alone_and_after_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    pool = NotedPool(store)
    standing = drive(read_campaign(write_spec(tmp_path, PROFILED)), store, pool, lambda *_: None)
    assert (standing.finished, standing.left) == (5, 0)
    assert {"tune", "2 at once"} in pool.beside
    assert pool.beside[-2:] == [{"profile", "1 at once"}] * 2
    assert not any("profile" in beside for beside in pool.beside[:-2])


def test_a_worker_that_cannot_write_ends_the_campaign_and_every_worker(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    pool = NotedPool(store, end="halted")
    with pytest.raises(ArtifactError, match="the disk is full"):
        drive(read_campaign(write_spec(tmp_path, PROFILED)), store, pool, lambda *_: None)
    assert pool.is_closed
    assert len(pool.started) == 2
    assert not list(store.failed.glob("*"))


def test_a_run_that_kills_its_workers_counts_as_failed_and_is_made_again_only_on_request(tmp_path: Path) -> None:
    store, campaign = Store(tmp_path / "out"), read_campaign(write_spec(tmp_path, PROFILED))
    pool = NotedPool(store, end="died")
    assert drive(campaign, store, pool, lambda *_: None).failed == 5
    assert sorted(pool.started) == sorted([*set(pool.started)] * MOST_DEATHS)
    failures = [json.loads(file.read_text()) for file in store.failed.glob("*/failure.json")]
    assert {failure["reason"] for failure in failures} == {"worker died"}
    again = NotedPool(store)
    assert drive(campaign, store, again, lambda *_: None).failed == 5
    assert again.started == []
    retried = drive(campaign, store, again, lambda *_: None, retry_failed=True)
    assert (retried.finished, retried.failed) == (5, 0)
    assert sorted(again.started) == sorted(set(pool.started))
