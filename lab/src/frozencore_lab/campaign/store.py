"""The folder of a campaign: its specification, one folder for each run, failures, and shared files.

campaign.json             the specification
runs/ID/result.json       a finished run, written atomically
runs/.ID.partial/         a running or killed run: its log.txt and checkpoints
failed/ID/failure.json    the reason of a failure, and log.txt
shared/                   moments and weights-only bases, computed once
records.jsonl             every record, one a line: an index rebuilt from runs/, and all that a report needs

A run's own file has priority; the index is used for runs that were made elsewhere. A run that was made here has a lock
file: if its folder is removed, it is made again.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import remove_left, require_writable, write_json, write_lines, write_text
from frozencore.tune.folder import FAILURE, RECORD, remove_work
from frozencore.tune.record import Failure, RunRecord, read_failure, read_record
from frozencore_lab.campaign.job import ID_DIGITS
from frozencore_lab.campaign.plan import Ended
from frozencore_lab.campaign.spec import Campaign, read_campaign

INDEX = "records.jsonl"
LOG = "log.txt"
SPECIFICATION = "campaign.json"
T = TypeVar("T")
_ID = re.compile(f"[0-9a-f]{{{ID_DIGITS}}}")
_ID_IN_LINE = re.compile(rf'"run_id": ?"({_ID.pattern})"')


class Store:
    """One campaign's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.failed = folder / "failed"
        self.shared = folder / "shared"
        self._records: dict[str, RunRecord] = {}

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        """Pickle with an absolute path, so that another process finds the same folder."""
        return Store, (self.folder.absolute(),)

    def require_own(self, campaign: Campaign) -> None:
        """Check, without writing, that the campaign can use the folder; otherwise ``ArtifactError``."""
        require_writable(self.folder)
        if (self.folder / SPECIFICATION).exists() and self.campaign().name != campaign.name:
            raise ArtifactError(
                f"{self.folder} holds the campaign {self.campaign().name!r}, not {campaign.name!r}. "
                "Choose another --out."
            )

    def open(self, campaign: Campaign) -> None:
        """Make the folder or use the existing one; the specification may have changed, but not its name."""
        self.require_own(campaign)
        # in ASCII, because it is read as YAML, in which some other characters are line breaks
        write_text(self.folder / SPECIFICATION, json.dumps(campaign.model_dump(mode="json"), indent=2) + "\n")

    def campaign(self) -> Campaign:
        """The campaign of the folder; ``ArtifactError`` if it is no campaign's."""
        file = self.folder / SPECIFICATION
        if not file.is_file():
            raise ArtifactError(f"{self.folder} is no campaign's folder: it holds no {SPECIFICATION}. Name another.")
        return read_campaign(file)

    def outcome(self, run_id: str) -> Ended | None:
        """The record or the failure of a run; None before its end."""
        failure = self.failed / run_id / FAILURE
        return self._record(run_id) or (_read(failure, read_failure) if failure.exists() else None)

    @contextmanager
    def running(self, run_id: str) -> Iterator[Path | None]:
        """Yield the temporary folder of a run; None if it is finished. Waits for another process that makes the run.

        If the block ends and a ``result.json`` exists, the folder is renamed to the run's. A killed process leaves the
        temporary folder with its checkpoints.

        Raises:
            ArtifactError: The run's folder exists without a result.
        """
        aside, folder = self._partial(run_id), self.runs / run_id
        with self.locked(f"run-{run_id}"):
            if folder.exists():
                if not (folder / RECORD).exists():
                    raise ArtifactError(f"{folder} holds no {RECORD}. Remove it and the run is made again.")
                yield None
                return
            aside.mkdir(parents=True, exist_ok=True)
            # A result exists if its process was killed while it removed its work, or just before renaming.
            yield None if (aside / RECORD).exists() else aside
            if (aside / RECORD).exists():
                remove_work(aside)
                remove_left(aside)
                aside.replace(folder)
                shutil.rmtree(self.failed / run_id, ignore_errors=True)

    def fail(self, run_id: str, failure: Failure, last_words: str) -> None:
        """Record the failure of a run and keep its log; its other files are removed."""
        log = self._partial(run_id) / LOG
        told = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        write_text(self.log_of_failed(run_id), told + last_words)
        write_json(self.failed / run_id / FAILURE, failure.content())
        shutil.rmtree(self._partial(run_id), ignore_errors=True)

    def log_of_failed(self, run_id: str) -> Path:
        """The log of a run that failed."""
        return self.failed / run_id / LOG

    def forget_failures(self) -> None:
        """Remove the failures, so that these runs are tried again."""
        shutil.rmtree(self.failed, ignore_errors=True)

    @contextmanager
    def locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Hold a lock of this folder; the system releases it when the process ends in any way.

        Raises:
            ArtifactError: Another process holds it and ``wait`` is off, or the file system has no locks.
        """
        with ExitStack() as held:
            try:
                self._lock(name).parent.mkdir(parents=True, exist_ok=True)
                file = held.enter_context(self._lock(name).open("w"))
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise ArtifactError(
                    f"Another process drives the campaign in {self.folder}. Wait for it, or stop it."
                ) from error
            except OSError as error:
                raise ArtifactError(
                    f"{self.folder} takes no file lock: {error.strerror}. Choose a writable folder on a file system "
                    "with working flock."
                ) from error
            yield

    def running_now(self) -> list[str]:
        """Ids of the runs that a process is making now."""
        found = []
        for folder in self.runs.glob(".*.partial"):
            run_id = folder.name.split(".")[1]
            found.append(run_id)
            with suppress(ArtifactError), self.locked(f"run-{run_id}", wait=False):
                found.remove(run_id)
        return found

    def write_index(self) -> None:
        """Rewrite ``records.jsonl`` from ``runs/`` and its previous records."""
        made = {file.parent.name for file in self.runs.glob(f"*/{RECORD}") if _ID.fullmatch(file.parent.name)}
        records = {run_id: self._record(run_id) for run_id in sorted(made | self._index.keys())}
        write_lines(self.folder / INDEX, (record.content() for record in records.values() if record is not None))

    def _partial(self, run_id: str) -> Path:
        return self.runs / f".{run_id}.partial"

    def _record(self, run_id: str) -> RunRecord | None:
        file = self.runs / run_id / RECORD
        if run_id not in self._records and file.exists():
            self._records[run_id] = _read(file, read_record).model_copy(update={"run_id": run_id})
        if run_id in self._records:
            return self._records[run_id]
        was_removed = self.runs.is_dir() and self._lock(f"run-{run_id}").exists()
        return None if was_removed else self._index.get(run_id)

    def _lock(self, name: str) -> Path:
        return self.folder / "locks" / name

    @cached_property
    def _index(self) -> dict[str, RunRecord]:
        file = self.folder / INDEX
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else []
        records: dict[str, RunRecord] = {}
        for number, line in enumerate(filter(None, lines), start=1):
            with suppress(ValueError):
                record = read_record(line)
                if record.run_id is not None and _ID.fullmatch(record.run_id):
                    if records.setdefault(record.run_id, record) != record:
                        raise ArtifactError(f"{file} holds two records of run {record.run_id} that differ. Keep one.")
                    continue
            named = _ID_IN_LINE.search(line)
            rebuilt_from = self.runs / named[1] / RECORD if named else self.runs
            if not rebuilt_from.exists():
                raise ArtifactError(
                    f"{file}, line {number} is damaged or of a newer frozencore, and its run is not in runs/. Restore "
                    "the file, update frozencore, or remove the line: a run that is not in runs/ is made again."
                )
        return records


def _read(file: Path, reader: Callable[[str], T]) -> T:
    try:
        return reader(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} is damaged ({error}). Remove its folder: the run is made again.") from error
