"""One worker, run after run: what it takes up, what it shares, and what one run leaves for the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model

from frozencore import FrozenCoreConfig
from frozencore.adapter.loaded_adapter import frozen_core_layers
from frozencore.calibration.collect import collect_moments
from frozencore.errors import ArtifactError
from frozencore.maths.whitening import damped
from frozencore.progress import no_progress
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import Failure, RunRecord
from frozencore.tune.rows.token_batches import calibration_batches
from frozencore.tune.run import execute
from frozencore_lab.campaign.job import Job, Place, make_job
from frozencore_lab.campaign.moments_file import load_moments
from frozencore_lab.campaign.shared_moments import needs_of
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Worker
from references import captured, numpy_of
from small_runs import inputs_of

OPTIONS: dict[str, Any] = {
    "model": "pocket", "task": "pocket-sentiment", "dtype": "float32", "seed": 42, "batch_size": 8, "accumulation": 1,
    "num_train": 16, "num_evaluation": 8, "epochs": 1, "calibration_size": 8,
}  # fmt: skip


def job_of(method: str, **options: object) -> Job:
    return make_job("tune", {**OPTIONS, "method": method, **options})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "campaign")


def record_of(store: Store, job: Job) -> Any:
    outcome = store.outcome(job.id)
    assert isinstance(outcome, RunRecord), outcome
    return outcome


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (MemoryError(), "out of memory"),
        (ArtifactError("not this one"), "bad input"),
        (KeyError("a mistake of ours"), "error"),
    ],
)
def test_a_failure_says_what_kind_it_is_also_where_another_error_hides_it(
    error: Exception, reason: str, store: Store
) -> None:
    def fails(*_: object) -> None:
        try:
            raise error
        finally:
            if reason == "out of memory":
                raise RuntimeError("a trainer's own words")

    job = job_of("random")
    assert not Worker(store, Place()).run(job, {}, fails)
    outcome = store.outcome(job.id)
    assert isinstance(outcome, Failure)
    assert outcome.reason == reason
    assert outcome.config == job.resolved
    assert outcome.message


def test_a_failure_is_recorded_before_another_process_may_make_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, fail, made_now = job_of("random"), Store.fail, []

    def watched(self: Store, *of: Any) -> None:
        made_now.extend(Store(self.folder).running_now())
        fail(self, *of)

    monkeypatch.setattr(Store, "fail", watched)
    assert not Worker(store, Place(models={"pocket": str(store.folder / "nowhere")})).run(job, {}, no_progress)
    assert made_now == [job.id]
    assert isinstance(store.outcome(job.id), Failure)
    assert not list(store.runs.glob(".*.partial"))


def test_after_pissa_which_changes_the_base_model_the_next_run_is_as_if_alone(store: Store, tmp_path: Path) -> None:
    first, second = job_of("pissa"), job_of("lora_xs")
    worker = Worker(store, Place(), keep_adapters=True)
    assert worker.run(first, {}, no_progress)
    assert worker.run(second, {}, no_progress)
    alone = execute(second.config, tmp_path / "alone", no_progress)
    for key in ("hashes", "held_out_loss_before", "held_out_loss", "accuracy"):
        assert getattr(record_of(store, second), key) == getattr(alone, key), key


def test_moments_that_lack_what_a_later_method_wants_are_collected_again_for_both(store: Store) -> None:
    """No run said before what the others want: each asks for its own."""
    worker = Worker(store, Place())
    names = []
    for method in ("signgrad", "eva", "signgrad"):
        assert worker.run(job_of(method, rank=4 + len(names)), {}, no_progress)
        (file,) = (store.shared / "moments").glob("*.safetensors")
        names.append(set(next(iter(load_moments(file).values())).names()))
    own, both, unchanged = names
    assert own < both
    assert both == unchanged


def test_a_run_that_reads_no_data_is_measured_on_the_moments_that_others_share(store: Store) -> None:
    free, reader = job_of("lora_xs", rank=4), job_of("rawgrad", rank=4)
    worker = Worker(store, Place())
    assert worker.run(free, needs_of([free, reader]), no_progress)
    assert worker.run(reader, needs_of([free, reader]), no_progress)
    assert len(list((store.shared / "moments").glob("*.safetensors"))) == 1

    prepared = inputs_of(free.config)
    options = FrozenCoreConfig(r=4, constructor="lora_xs", seed=42, task_type="CAUSAL_LM")
    layers = frozen_core_layers(get_peft_model(prepared.model, options), "default")
    batches = calibration_batches(prepared.rows.calibration, prepared.encoder.pad_id)
    moments = collect_moments(prepared.model, batches, {name: layer.get_base_layer() for name, layer in layers.items()})
    J = {}
    for name, layer in layers.items():
        A, D = (np.diag(numpy_of(damped(moment, 1e-3))) for moment in (moments[name].a, moments[name].d))
        basis = layer.basis("default")
        J[name] = captured(numpy_of(moments[name].G), A, D, numpy_of(basis.P), numpy_of(basis.Q))
    alignment = record_of(store, free).alignment
    assert dict(zip(alignment.layers.name, alignment.layers.J, strict=True)) == pytest.approx(J, rel=1e-4)
    assert pytest.approx(sum(J.values()), rel=1e-4) == alignment.J
    assert record_of(store, reader).alignment.gradient > alignment.gradient


def test_a_run_that_nobody_shares_moments_with_collects_none_for_a_remark(store: Store) -> None:
    job = job_of("lora_xs")
    assert Worker(store, Place()).run(job, needs_of([job]), no_progress)
    assert record_of(store, job).alignment is None
    assert not (store.shared / "moments").exists()


def test_a_first_run_collects_for_all_also_where_the_model_lies_elsewhere(store: Store) -> None:
    place = Place(models={"somewhere": str(pocket_model_path())})
    jobs = [job_of(method, model="somewhere") for method in ("signgrad", "eva")]
    worker, shared = Worker(store, place), needs_of(jobs)
    files = []
    for job in jobs:
        assert worker.run(job, shared, no_progress)
        (file,) = (store.shared / "moments").glob("*.safetensors")
        files.append((file.stat().st_ino, file.stat().st_mtime_ns))
    assert files[0] == files[1]
