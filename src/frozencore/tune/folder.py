"""The files in the folder of a run, and whether a new run may use that folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from frozencore.errors import ArtifactError, TrainingError
from frozencore.files.adapter_folder import IN_A_RUN
from frozencore.files.whole_file import require_writable
from frozencore.tune.training.checkpoints import newest_complete, step_of

RECORD, FAILURE = "result.json", "failure.json"
OPTIONS_FILE = "run.yaml"  # the options of `tune`, in the form of --config
PREDICTIONS, SAMPLES = "predictions.jsonl", "samples.jsonl"
ADAPTER, BASIS = IN_A_RUN, "basis"
MANIFEST = "tenants.json"  # beside the basis that many tenants share: what it was made of
MOMENTS_FILE = "moments.safetensors"
CHECKPOINTS, CACHE = "checkpoints", ".found"  # exist until a run ends
BASE_SCORE, CALIBRATION = "base-score.json", "calibration.json"  # files in the cache
START, LAST_GOOD = "start", "last-good-adapter"  # the first state that saving may need; the core before a divergence
_WORK = {RECORD: "a finished run", MOMENTS_FILE: "a calibration", ADAPTER: "a calibration"}


def interrupted_work(out: Path) -> str | None:
    """Describe the files of an interrupted run in a folder; None if there are none."""
    newest = newest_complete(out / CHECKPOINTS)
    if newest is not None:
        return f"its step {step_of(newest)}"
    kept = ((CALIBRATION, "its bases"), (BASE_SCORE, "the base model's score"))
    for name, words in kept:
        if (out / CACHE / name).is_file():
            return words
    return None


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
    """
    require_writable(out)
    for name in names:
        if (out / name).exists():
            raise ArtifactError(f"{out} already holds {_WORK[name]}. Choose another --out, or remove that folder.")


def refuse_interrupted(out: Path) -> None:
    """Check before any work that the folder holds no interrupted run.

    Raises:
        TrainingError: The folder holds an interrupted run.
    """
    if (kept := interrupted_work(out)) is not None:
        raise TrainingError(
            f"{out} holds an interrupted run, which has kept {kept}. Go on from there with --resume, or choose another "
            "--out."
        )


def refuse_used(out: Path, *, resume: bool) -> None:
    """Check before any work that a run may use the folder.

    Raises:
        ArtifactError: The folder cannot be written, or holds a finished run.
        TrainingError: The folder holds an interrupted run, and ``resume`` is off.
    """
    if resume and (out / RECORD).exists():
        raise ArtifactError(f"{out} holds a finished run: there is nothing to resume. Choose another --out.")
    require_new(out, RECORD)
    if not resume:
        refuse_interrupted(out)
