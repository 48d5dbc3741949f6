"""The folder of a campaign: its specification, one folder a run, what failed, and what runs share.

campaign.json             the specification
runs/ID/result.json       a finished run; written aside and renamed, so it is whole or not there
runs/.ID.partial/         a run that somebody makes, or that was killed: its log.txt and checkpoints
failed/ID/failure.json    why a run has no result, and log.txt
shared/                   moments and weight bases, computed once
records.jsonl             every record, one a line: an index that is rebuilt from runs/, and all that a report needs

A run's own file is what counts; the index stands for runs that are not beside it.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from frozencore.errors import ArtifactError
from frozencore.files.whole_file import remove_left, require_writable, write_json, write_lines, write_text
from frozencore.tune.run.record import Failure, RunRecord, read_failure, read_record
from frozencore.tune.run.run_folder import RECORD
from frozencore_lab.campaign.plan import Ended
from frozencore_lab.campaign.spec import Campaign, read_campaign

INDEX = "records.jsonl"
LOG = "log.txt"
SPECIFICATION = "campaign.json"
T = TypeVar("T")
_ID = re.compile(r"[0-9a-f]{16}")


class Store:
    """One campaign's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.failed = folder / "failed"
        self.shared = folder / "shared"
        self._records: dict[str, RunRecord] = {}

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        """Another process gets the same folder, under a path that its own working directory does not change."""
        return Store, (self.folder.absolute(),)

    def require_own(self, campaign: Campaign) -> None:
        """Refuse a folder that this campaign cannot have; nothing is written.

        Raises:
            ArtifactError: The folder cannot be written, or holds another campaign.
        """
        require_writable(self.folder)
        if (self.folder / SPECIFICATION).exists() and self.campaign().name != campaign.name:
            raise ArtifactError(
                f"{self.folder} holds the campaign {self.campaign().name!r}, not {campaign.name!r}. "
                "Choose another --output."
            )

    def open(self, campaign: Campaign) -> None:
        """Make the folder, or take up the one that is there; the specification may have grown, its name not changed.

        Raises:
            ArtifactError: As for :meth:`require_own`.
        """
        self.require_own(campaign)
        # in ASCII: it is read as YAML, to which some characters of other scripts are line breaks
        write_text(self.folder / SPECIFICATION, json.dumps(campaign.model_dump(mode="json"), indent=2) + "\n")

    def campaign(self) -> Campaign:
        """The campaign that the folder is of.

        Raises:
            ArtifactError: It is no campaign's folder.
        """
        file = self.folder / SPECIFICATION
        if not file.is_file():
            raise ArtifactError(f"{self.folder} is no campaign's folder: it holds no {SPECIFICATION}. Name another.")
        return read_campaign(file)

    def outcome(self, run_id: str) -> Ended | None:
        """The record of a run, or why it failed; None before its end."""
        failure = self.failed / run_id / "failure.json"
        return self._record(run_id) or (_read(failure, read_failure) if failure.exists() else None)

    @contextmanager
    def running(self, run_id: str) -> Iterator[Path | None]:
        """The folder that a run is to fill; None if it is finished. Another process that runs it is waited for.

        The folder becomes the run's own when the block ends and a ``result.json`` is in it. One that was killed leaves
        it as it is, with its checkpoints.

        Raises:
            ArtifactError: The run's folder is there, without its result.
        """
        aside, folder = self._partial(run_id), self.runs / run_id
        with self.locked(f"run-{run_id}"):
            if folder.exists():
                if not (folder / RECORD).exists():
                    raise ArtifactError(f"{folder} holds no {RECORD}. Remove it and the run is made again.")
                yield None
                return
            aside.mkdir(parents=True, exist_ok=True)
            # A result is there when its process was killed just before the renaming.
            yield None if (aside / RECORD).exists() else aside
            if (aside / RECORD).exists():
                remove_left(aside)
                aside.replace(folder)
                shutil.rmtree(self.failed / run_id, ignore_errors=True)

    def fail(self, run_id: str, failure: Failure, last_words: str) -> None:
        """Note why a run has no result, and keep its log; what else it had begun is removed.

        Raises:
            ArtifactError: The folder cannot be written.
        """
        log = self._partial(run_id) / LOG
        told = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        write_text(self.failed / run_id / LOG, told + last_words)
        write_json(self.failed / run_id / "failure.json", failure.content())
        shutil.rmtree(self._partial(run_id), ignore_errors=True)

    def forget_failures(self) -> int:
        """Let failed runs be tried again; how many there were."""
        failed = list(self.failed.glob("*/failure.json"))
        shutil.rmtree(self.failed, ignore_errors=True)
        return len(failed)

    @contextmanager
    def locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Hold a lock of this folder; the system drops it when the process ends, however it ends.

        Raises:
            ArtifactError: Another process holds it, without ``wait``; or nothing can be locked here.
        """
        with ExitStack() as held:
            try:
                (self.folder / "locks").mkdir(parents=True, exist_ok=True)
                file = held.enter_context((self.folder / "locks" / name).open("w"))
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
        """Ids of the runs that some process is making at this moment."""
        found = []
        for folder in self.runs.glob(".*.partial"):
            run_id = folder.name.split(".")[1]
            try:
                with self.locked(f"run-{run_id}", wait=False):
                    pass
            except ArtifactError:
                found.append(run_id)
        return found

    def write_index(self) -> None:
        """Write ``records.jsonl`` anew from what lies in ``runs/`` and what it knew besides."""
        made = {file.parent.name for file in self.runs.glob(f"*/{RECORD}") if _ID.fullmatch(file.parent.name)}
        records = {run_id: self._record(run_id) for run_id in sorted(made | self._index.keys())}
        write_lines(self.folder / INDEX, (record.content() for record in records.values() if record is not None))

    def _partial(self, run_id: str) -> Path:
        return self.runs / f".{run_id}.partial"

    def _record(self, run_id: str) -> RunRecord | None:
        file = self.runs / run_id / RECORD
        if run_id not in self._records and file.exists():
            self._records[run_id] = _read(file, read_record).model_copy(update={"run_id": run_id})
        return self._records.get(run_id) or self._index.get(run_id)

    @cached_property
    def _index(self) -> dict[str, RunRecord]:
        file = self.folder / INDEX
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        records: dict[str, RunRecord] = {}
        for number, line in enumerate(lines, start=1):
            record = _parsed(line)
            if record is not None and record.run_id is not None:
                records[record.run_id] = record
            elif not self.runs.is_dir():  # elsewhere it is rebuilt from the runs
                raise ArtifactError(
                    f"{file}, line {number} is damaged, and there are no runs/ to rebuild it from. Restore the file."
                )
        return records


def _read(file: Path, reader: Callable[[str], T]) -> T:
    try:
        return reader(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{file} is damaged ({error}). Remove its folder and {INDEX}: the run is made again, the index rebuilt."
        ) from error


def _parsed(line: str) -> RunRecord | None:
    try:
        record = read_record(line)
    except ValueError:
        return None
    return record if record.run_id is not None and _ID.fullmatch(record.run_id) else None
