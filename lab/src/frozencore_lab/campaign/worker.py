"""Make one run of a campaign, from job to result: an idempotent step that any process may take."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from frozencore.device import is_out_of_memory
from frozencore.errors import ArtifactError, DivergenceError, FrozenCoreError
from frozencore.files.names import ADAPTER
from frozencore.progress import Progress
from frozencore.text import one_line
from frozencore.tune.config_parts import ModelConfig
from frozencore.tune.load import Base, load
from frozencore.tune.provenance import Provenance
from frozencore.tune.record import Failure
from frozencore.tune.run_rows import RowCache
from frozencore.tune.scoring.score import Score
from frozencore_lab.campaign.job import Job, Place, Work
from frozencore_lab.campaign.shared_moments import Needs, SharedWork, calibrating, moments_key
from frozencore_lab.campaign.store import LOG, Store

NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class _UnwritableError(ArtifactError):
    """The campaign's folder cannot be written."""


@dataclass
class Worker:
    """Run jobs in sequence; jobs with the same base model share one loaded model. It can be pickled."""

    store: Store
    place: Place
    keep_adapters: bool = False
    _base: tuple[ModelConfig, Base] | None = field(default=None, init=False)
    _scores: dict[str, Score] = field(default_factory=dict, init=False)
    _rows: RowCache = field(default_factory=RowCache, init=False)

    def run(self, job: Job, needs: Needs, progress: Progress) -> bool:
        """Make a run's result, or record its failure and return False.

        After an interruption that is not the run's error (Ctrl-C, a kill, a full disk) the run stays open, with its log
        and checkpoints.

        Raises:
            ArtifactError: The campaign's folder cannot be written, so other runs would fail too.
        """
        try:
            with self.store.running(job.id) as folder:
                try:
                    if folder is not None:
                        with (folder / LOG).open("a", encoding="utf-8", buffering=1) as log:  # by line: outlives a kill
                            self._make(job, folder, needs, _logged(log, progress))
                except Exception as error:  # recorded under the run's lock, for which another process may wait
                    self._fail(job, error)
                    return False
        except _UnwritableError:
            raise
        except Exception as error:  # of the run's folder itself
            self._fail(job, error)
            return False
        return True

    def _fail(self, job: Job, error: Exception) -> None:
        self._base = None  # the model may have half an adapter
        message, reason = one_line(error) or type(error).__name__, _reason(error)
        if reason == "not writable":
            raise _UnwritableError(
                f"{self.store.folder} cannot be written: {message} Make room and give the same command again: "
                "finished runs are kept."
            ) from error
        here = Provenance.here(self.place.device)
        failure = Failure(reason=reason, message=message, config=job.resolved, provenance=here)
        self.store.fail(job.id, failure, "".join(traceback.format_exception(error)))

    def _make(self, job: Job, folder: Path, needs: Needs, progress: Progress) -> None:
        placed = [(one, self.place.put(one)) for one in calibrating(job)]
        here = {moments_key(there): needs.get(moments_key(one), frozenset()) for one, there in placed}
        (_, config), *reference = placed
        if self._base is None or self._base[0] != config.model:
            self._base = None  # freed before loading the next, because two may not fit
            self._base = config.model, load(config.model)
        work = Work(
            config=config,
            reference=reference[0][1] if reference else None,
            folder=folder,
            progress=progress,
            base=self._base[1],
            rows=self._rows,
            base_scores=self._scores,
            shared=None if job.kind.is_alone else SharedWork(self.store, here),
        )
        job.kind.run(work)
        if config.method.entry.changes_base:
            self._base = None
        if not self.keep_adapters or config.scoring.is_trial:
            shutil.rmtree(folder / ADAPTER, ignore_errors=True)


def _logged(log: TextIO, progress: Progress) -> Progress:
    def tell(stage: str, done: int, total: int | None, note: str = "") -> None:
        log.write(f"{stage} {done}/{total} {note}".rstrip() + "\n")
        progress(stage, done, total, note)

    return tell


def _reason(error: Exception) -> str:
    """The kind of a failure, from the error and those that it was raised from."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    words = (*map(os.strerror, NOT_WRITABLE), "PytorchStreamWriter failed")  # of safetensors and torch
    if any(getattr(one, "errno", None) in NOT_WRITABLE or any(word in str(one) for word in words) for one in causes):
        return "not writable"
    if any(map(is_out_of_memory, causes)):
        return "out of memory"
    if isinstance(error, DivergenceError):
        return "diverged"
    return "bad input" if isinstance(error, FrozenCoreError) else "error"
