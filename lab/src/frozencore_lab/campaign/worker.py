"""One run of a campaign, from job to result: an idempotent step that any process may take."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TextIO

from peft import PeftModel

from frozencore.device import is_out_of_memory
from frozencore.errors import ArtifactError, DivergenceError, FrozenCoreError
from frozencore.files.whole_file import write_json
from frozencore.maths.moments import MomentName
from frozencore.tune.methods import Targets
from frozencore.tune.run.adapting import Adapted, adapt_from_data
from frozencore.tune.run.bench import Base, Bench, Score, prepare
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.execute import execute
from frozencore.tune.run.files import ADAPTER, RECORD
from frozencore.tune.run.kept_rows import KeptRows
from frozencore.tune.run.loading import load_model
from frozencore.tune.run.record import Failure, StabilityRecord
from frozencore.tune.run.record_parts import Provenance
from frozencore.tune.scoring.forward import take_off
from frozencore.words import Progress, one_line
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.shared import SharedWork, calibrating, moments_key, replace_size
from frozencore_lab.campaign.stability import Calibrated, compare_bases
from frozencore_lab.campaign.store import LOG, Store

Reason = Literal["diverged", "out of memory", "bad input", "error"]
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


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
        self._rows = KeptRows()

    def run(self, job: Job, shared: SharedWork, progress: Progress) -> bool:
        """Make a run's result, or note why there is none; False for the latter.

        What is not an error of the run (Ctrl-C, a kill, a full disk) leaves it as if it had never begun, with its log
        and its checkpoints.

        Raises:
            ArtifactError: The campaign's folder cannot be written: no other run would fare better.
        """
        try:
            with self.store.running(job.id) as folder:
                if folder is not None:
                    with (folder / LOG).open("a", encoding="utf-8", buffering=1) as log:  # by line: outlives a kill
                        self._make(job, folder, shared, _logged(log, progress))
        except Exception as error:
            self._base = None  # it may hold half an adapter
            if _cannot_write(error):
                raise ArtifactError(
                    f"{self.store.folder} cannot be written: {_message(error)} Make room and give the same command "
                    "again: finished runs are kept."
                ) from error
            failure = Failure(
                reason=_reason(error),
                message=_message(error),
                config=job.resolved,
                provenance=Provenance.here(),
            )
            self.store.fail(job.id, failure, traceback.format_exc())
            is_made = False
        else:
            is_made = True
        return is_made

    def _make(self, job: Job, folder: Path, shared: SharedWork, progress: Progress) -> None:
        config = self.place.put(job.config)
        bench = prepare(config, progress, self._base_of(config), kept_rows=self._rows)
        shared = self._placed(job, shared)
        if job.kind == "stability":
            assert job.reference_size is not None
            record = self._compare(job, Calibrated(config, bench), shared, progress)
            write_json(folder / RECORD, record.content())
            return
        rows = f"{config.model} {config.dtype} {bench.rows.fingerprints()['evaluation']}"
        bench.before = self._before.get(rows)
        adapted: list[PeftModel] = []

        def adapt(config: RunConfig, bench: Bench, targets: Targets, progress: Progress) -> Adapted:
            source = adapt_from_data if job.kind == "profile" else shared.adapt
            model, calibration = source(config, bench, targets, progress)
            adapted.append(model)
            return model, calibration

        measure = shared.measure if job.kind != "profile" else None
        execute(config, folder, progress, bench=bench, resume=True, adapt=adapt, measure=measure)
        assert bench.before is not None
        self._before[rows] = bench.before
        self._release(config, adapted[-1])
        if not self.keep_adapters or config.evaluate_on == "validation":
            shutil.rmtree(folder / ADAPTER, ignore_errors=True)

    def _compare(self, job: Job, run: Calibrated, shared: SharedWork, progress: Progress) -> StabilityRecord:
        assert job.reference_size is not None
        config = self.place.put(replace_size(job.config, job.reference_size))
        bench = prepare(config, progress, self._base_of(config), kept_rows=self._rows)
        return compare_bases(run, Calibrated(config, bench), job.reference_size, shared, progress)

    def _placed(self, job: Job, shared: SharedWork) -> SharedWork:
        """What other runs want of this one's moments, under the names that moments have here."""
        needs: dict[str, frozenset[MomentName]] = {}
        for config in calibrating(job):
            key = moments_key(self.place.put(config))
            needs[key] = needs.get(key, frozenset()) | shared.needs.get(moments_key(config), frozenset())
        return replace(shared, needs=needs)

    def _base_of(self, config: RunConfig) -> Base:
        key = (config.model, config.dtype, config.device)
        if self._base is None or self._base[0] != key:
            self._base = None  # before the next one is loaded: two may not fit
            self._base = key, Base(*load_model(config.model, dtype=config.dtype, device=config.device))
        return self._base[1]

    def _release(self, config: RunConfig, model: PeftModel) -> None:
        """Take the adapter off the base again, unless the method has made another model of it."""
        if config.method_entry.changes_base:
            self._base = None
        else:
            take_off(model)


def _logged(log: TextIO, progress: Progress) -> Progress:
    def tell(stage: str, done: int, total: int | None, note: str = "") -> None:
        log.write(f"{stage} {done}/{total} {note}".rstrip() + "\n")
        progress(stage, done, total, note)

    return tell


def _reason(error: Exception) -> Reason:
    if any(is_out_of_memory(cause) for cause in _causes(error)):
        return "out of memory"
    if isinstance(error, DivergenceError):
        return "diverged"
    return "bad input" if isinstance(error, FrozenCoreError) else "error"


def _cannot_write(error: Exception) -> bool:
    """Whether the disk is the reason; safetensors and torch say so in words alone."""
    words = (*map(os.strerror, NOT_WRITABLE), "PytorchStreamWriter failed")
    return any(
        (isinstance(cause, OSError) and cause.errno in NOT_WRITABLE) or any(word in str(cause) for word in words)
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _message(error: Exception) -> str:
    return one_line(error) or type(error).__name__
