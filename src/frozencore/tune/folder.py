"""The files in the folder of a run, and whether a new run may use that folder."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import yaml

from frozencore.errors import ArtifactError, FrozenCoreError, TrainingError
from frozencore.files.adapter_folder import has_begun
from frozencore.files.atomic_write import remove_left, require_writable, write_json, write_text
from frozencore.files.names import ADAPTER, BASIS, HASHES, RUN_FILE
from frozencore.files.strict_yaml import read_yaml
from frozencore.text import flag_of
from frozencore.tune.config import PLACES, RunConfig, as_flags, run_options
from frozencore.tune.processes import is_first
from frozencore.tune.record import RunRecord, read_record
from frozencore.tune.training.checkpoints import newest_whole, step_of

RECORD, FAILURE = "result.json", "failure.json"
PREDICTIONS, SAMPLES, FIGURE = "predictions.jsonl", "samples.jsonl", "training.png"
INPUTS = {
    "model": "the base model", "config": "the base model's configuration", "basis": "the basis",
    "start": "the core that it starts from", "recipe": "the recipe",
}  # fmt: skip
START, BASE_SCORE, CHECKPOINTS = "start", "base-score.json", "checkpoints"  # until a run ends, as HASHES
CALIBRATION = "calibration.json"  # in the start: the calibration that made it
_NAMED = {RECORD: "a finished run", ADAPTER: "an adapter", BASIS: "a basis"}
_WORK = (CHECKPOINTS, START, BASE_SCORE, HASHES)  # only resuming needs them
_OF_A_RUN = (ADAPTER, PREDICTIONS, SAMPLES, FIGURE, *_WORK)  # it overwrites them
HASHED = frozenset({*PLACES, "model", "data", "eval_data", "basis", "start_from"})
"""Options that say where something is; a resumed run compares the hashes of what it reads there."""
_MAY_DIFFER = HASHED | {"calibration_data", "report_to", "save_steps"}  # the hash of a run's calibration rows is kept


def interrupted_work(out: Path) -> str | None:
    """Describe the files of an interrupted run in a folder; None if there are none, or the run has its record."""
    if (out / RECORD).exists():
        return None
    newest = newest_whole(out / CHECKPOINTS)
    if newest is not None:
        return f"its step {step_of(newest)}"
    if (out / START / CALIBRATION).is_file():
        return "its bases"
    return "the base model's score" if (out / BASE_SCORE).is_file() else None


def begin(out: Path, config: RunConfig, hashes: Mapping[str, str], *, resume: bool) -> None:
    """Write the hashes of a run's inputs and its given options; compare the hashes if the run is resumed.

    The hashes come first: they say of a run that is stopped between the two that its folder may be used again.

    Raises:
        TrainingError: The base model, the basis, the starting core, the rows or the recipe are not those that the run
            began with.
    """
    if resume and (out / HASHES).is_file():
        before = json.loads((out / HASHES).read_text())
        odd = [name for name in {**before, **hashes} if before.get(name) != hashes.get(name)]
        if odd:
            what = " and ".join(INPUTS.get(name, f"the {name} rows") for name in odd)
            raise TrainingError(
                f"To resume, model, basis, rows and recipe must be those that {out} began with, but {what} changed. "
                "Choose another --out."
            )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / HASHES, hashes)
    write_text(out / RUN_FILE, as_flags(config))


def remove_work(out: Path) -> None:
    """Remove the files that only resuming needs."""
    for name in _WORK:
        if (out / name).is_dir():
            shutil.rmtree(out / name, ignore_errors=True)
        else:
            (out / name).unlink(missing_ok=True)


@contextmanager
def removed_if_refused(out: Path) -> Iterator[None]:
    """If bad input raises an error inside, remove what a new run has written."""
    try:
        yield
    except FrozenCoreError:
        remove_work(out)
        (out / RUN_FILE).unlink(missing_ok=True)
        raise


def require_same_options(out: Path, config: RunConfig) -> None:
    """Check before any work that a resumed run has the options that it began with.

    Raises:
        TrainingError: An option differs; the message names it with both values.
    """
    if not (out / RUN_FILE).is_file():
        return
    before, now = read_yaml(out / RUN_FILE), yaml.safe_load(as_flags(config))
    for name, option in run_options().items():
        default = "none" if option.default is None else option.default
        was, given = (flags.get(name.replace("_", "-"), default) for flags in (before, now))
        if was != given and name not in _MAY_DIFFER:
            raise TrainingError(
                f"A resumed run has the options that it began with, but {flag_of(name)} is {given}, and was {was}. "
                f"`--resume --out {shlex.quote(str(out))}` needs no other option; or choose another --out."
            )


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make a run's folder and hold a lock on it; if the block fails, folders that are still empty are removed.

    The system releases the lock when the process ends in any way.

    Raises:
        TrainingError: Another process runs in this folder.
    """
    made = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(
                f"One run at a time writes into a folder, but another process is running in {out}. Choose another "
                "--out, or wait until it has ended."
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise
    finally:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # a forked process may hold the file open
        os.close(folder)


def require_new(out: Path, *names: str) -> None:
    """Check before any work that a folder can be written, and that no earlier work has left such files in it.

    Raises:
        ArtifactError: The folder cannot be written, or holds one of these files.
        TrainingError: The folder holds an interrupted run, whose end would write there too.
    """
    require_writable(out)
    if (kept := interrupted_work(out)) is not None:
        raise TrainingError(
            f"{out} holds an interrupted run, which has kept {kept}. Go on from there with `tune --resume`, or choose "
            "another --out."
        )
    for name in names:
        if (out / name).exists():
            content = _NAMED.get(name, f"{name}, which is not of this run")
            raise ArtifactError(f"{out} already holds {content}. Choose another --out, or remove that folder.")


def refuse_used(out: Path, *, resume: bool) -> None:
    """Check that a run may use the folder; in the folder of a run that has begun, its own files may be replaced.

    A run that was stopped after its record, while it removed its work, is finished: ``resume`` removes the rest.

    Raises:
        ArtifactError: The folder cannot be written, or holds a finished run or other files of these names.
        TrainingError: The folder holds an interrupted run, and ``resume`` is off.
    """
    is_begun = has_begun(out)
    if resume and (out / RECORD).exists():
        if is_begun:
            remove_work(out)
        raise ArtifactError(f"{out} holds a finished run: there is nothing to resume. Choose another --out.")
    if resume and is_begun:
        require_writable(out)
    else:
        require_new(out, RECORD, *(() if is_begun else _OF_A_RUN), *(() if is_begun or resume else (RUN_FILE,)))


@contextmanager
def claimed(out: Path, config: RunConfig, *, resume: bool) -> Iterator[None]:
    """Check that a run may use the folder, and lock it inside; of several processes the first holds the lock.

    The temporary files of a killed run are removed.

    Raises:
        ArtifactError, TrainingError: As in :func:`refuse_used`, :func:`require_same_options` and :func:`locked`.
    """
    require_writable(out)
    with locked(out) if is_first() else nullcontext():
        if is_first():
            for name in (*_OF_A_RUN, RUN_FILE, RECORD):
                remove_left(out, name)
        refuse_used(out, resume=resume)
        if resume:
            require_same_options(out, config)
        yield


def record_of_run(adapter: Path) -> RunRecord | None:
    """The record beside an adapter's folder; None if there is none, or it is damaged."""
    with suppress(OSError, ValueError):
        return read_record((adapter.parent / RECORD).read_text(encoding="utf-8"))
    return None
