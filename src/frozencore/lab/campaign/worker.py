"""One run of a campaign, from job to result: an idempotent step that any process may take."""

from __future__ import annotations

import shutil
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from peft import PeftModel

from frozencore.errors import FrozenCoreError, TrainingError
from frozencore.lab.campaign.job import Job
from frozencore.lab.campaign.shared import SharedWork, replace_size
from frozencore.lab.campaign.stability import compare_bases
from frozencore.lab.campaign.store import RECORD, Store
from frozencore.lab.config import RunConfig, Targets
from frozencore.lab.loading import load_model
from frozencore.lab.record import provenance, write_json
from frozencore.lab.run import RECORD_FORMAT, Adapted, Base, Bench, Score, Stages, adapt_from_data, execute, prepare

Reason = Literal["diverged", "out of memory", "bad input", "error"]


@dataclass(frozen=True)
class Place:
    """Where runs happen: what a campaign's identity leaves out.

    Attributes:
        models: Folders of models by the name that the specification gives them, instead of what it says.
    """

    data_root: Path | None = None
    device: str = "auto"
    models: dict[str, str] = field(default_factory=dict)

    def put(self, config: RunConfig) -> RunConfig:
        """The configuration as it is run here."""
        model = self.models.get(config.model, config.model)
        return config.model_copy(update={"data_root": self.data_root, "device": self.device, "model": model})


class Worker:
    """Runs jobs one after the other; the base model is loaded once for all that share it."""

    def __init__(self, store: Store, place: Place, *, keep_adapters: bool = False) -> None:
        self.store = store
        self.place = place
        self.keep_adapters = keep_adapters
        self._base: tuple[tuple[str, str, str], Base] | None = None
        self._before: dict[str, Score] = {}

    def run(self, job: Job, shared: SharedWork, stages: Stages) -> bool:
        """Make a run's result, or note why there is none; False for the latter.

        What is not an error of the run (Ctrl-C, a kill) leaves it as if it had never begun, with its checkpoints.
        """
        log: list[str] = []

        def logged(stage: str, done: int, total: int | None, note: str) -> None:
            log.append(f"{stage} {done}/{total} {note}".rstrip())
            stages(stage, done, total, note)

        try:
            with self.store.running(job.id) as folder:
                if folder is not None:
                    self._make(job, folder, shared, logged)
        except Exception as error:
            self._base = None  # it may hold half an adapter
            failure = {
                "reason": _reason(error),
                "message": " ".join(str(error).split()) or type(error).__name__,
                "config": job.resolved,
                "provenance": provenance(),
            }
            self.store.fail(job.id, failure, "\n".join([*log, traceback.format_exc()]))
            return False
        return True

    def _make(self, job: Job, folder: Path, shared: SharedWork, stages: Stages) -> None:
        config = self.place.put(job.config)
        bench = prepare(config, stages, self._base_of(config))
        if job.kind == "stability":
            assert job.reference_size is not None
            self._compare(job, config, bench, folder, shared, stages)
            return
        rows = f"{config.model} {config.dtype} {bench.rows.fingerprints()['evaluation']}"
        bench.before = self._before.get(rows)
        adapted: list[PeftModel] = []

        def adapt(config: RunConfig, bench: Bench, targets: Targets, stages: Stages) -> Adapted:
            source = adapt_from_data if job.kind == "profile" else shared.adapt
            model, calibration = source(config, bench, targets, stages)
            adapted.append(model)
            return model, calibration

        execute(config, folder, stages, bench=bench, resume=True, adapt=adapt)
        assert bench.before is not None
        self._before[rows] = bench.before
        self._release(config, adapted[-1])
        if not self.keep_adapters or config.evaluate_on == "validation":
            shutil.rmtree(folder / "adapter", ignore_errors=True)

    def _compare(
        self, job: Job, config: RunConfig, bench: Bench, folder: Path, shared: SharedWork, stages: Stages
    ) -> None:
        assert job.reference_size is not None
        larger = prepare(replace_size(config, job.reference_size), stages, self._base_of(config))
        found = compare_bases(config, bench, larger, job.reference_size, shared, stages)
        record = {"format": RECORD_FORMAT, "config": config.model_dump(mode="json"), **found}
        write_json(folder / RECORD, {**record, "reference_size": job.reference_size, "provenance": provenance()})

    def _base_of(self, config: RunConfig) -> Base:
        key = (config.model, config.dtype, config.device)
        if self._base is None or self._base[0] != key:
            self._base = None  # before the next one is loaded: two may not fit
            self._base = key, Base(*load_model(config.model, dtype=config.dtype, device=config.device))
        return self._base[1]

    def _release(self, config: RunConfig, model: PeftModel) -> None:
        """Take the adapter off the base again; PiSSA's base is no longer what it was."""
        if config.method == "pissa":
            self._base = None
        else:
            model.unload()


def _reason(error: Exception) -> Reason:
    if isinstance(error, TrainingError):
        return "diverged"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    return "bad input" if isinstance(error, FrozenCoreError) else "error"
