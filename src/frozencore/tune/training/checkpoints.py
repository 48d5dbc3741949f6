"""Checkpoints with a seal that shows whether they are complete and which run they belong to; signals that ask to stop.

The Trainer writes a checkpoint file by file. A seal, written last, lists every file's hash and the inputs of the run. A
folder without a seal, or with a file that does not match it, is incomplete and ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors import SafetensorError

from frozencore.errors import ConfigError, TrainingError
from frozencore.text import one_line

SEAL = "complete.json"
TENANT_STATES = "seats.json"  # in a checkpoint of many tenants: the tenants in slots


def seal_checkpoint(folder: Path, identity: Mapping[str, Any]) -> None:
    """Mark a checkpoint as complete: write the hashes of its files and the inputs of its run, atomically."""
    files = {str(path.relative_to(folder)): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    unsealed = folder / f"{SEAL}.part"
    unsealed.write_text(json.dumps({"identity": dict(identity), "files": files}, indent=1))
    os.replace(unsealed, folder / SEAL)


def _read_seal(folder: Path) -> dict[str, Any] | None:
    """The inputs of a checkpoint's run; None if a file does not match the seal."""
    try:
        seal = json.loads((folder / SEAL).read_text())
        whole = all(".." not in name and _sha256(folder / name) == digest for name, digest in seal["files"].items())
        return dict(seal["identity"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_complete(folder: Path) -> bool:
    """Return whether a checkpoint has a seal and every file matches it."""
    return _read_seal(folder) is not None


def checkpoints(out_dir: Path) -> list[Path]:
    """Every checkpoint folder, complete or not, by its number of steps."""
    folders = (path for path in out_dir.glob("checkpoint-*") if path.is_dir())
    return sorted((path for path in folders if path.name.split("-")[1].isdecimal()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of steps done at a checkpoint."""
    return int(checkpoint.name.split("-")[1])


def newest_complete(out_dir: Path) -> Path | None:
    """The complete checkpoint with the most steps, of any run; None if there is none."""
    return next(filter(is_complete, reversed(checkpoints(out_dir))), None)


def starting_point(checkpoint_dir: Path | None, resume: bool, identity: Mapping[str, Any]) -> Path | None:
    """The newest complete checkpoint to resume from; None for a training that starts at the beginning.

    Warns of newer checkpoints that are damaged.

    Args:
        identity: The inputs of the run that starts, as JSON values by name.

    Raises:
        ConfigError: There is no folder to resume from.
        TrainingError: The checkpoint belongs to a run with another recipe, other rows or other parameters; or the
            folder holds checkpoints, and ``resume`` is off.
    """
    if checkpoint_dir is None:
        if resume:
            raise ConfigError("To resume, training needs the folder of its checkpoints: give checkpoint_dir.")
        return None
    if not resume:
        if checkpoints(checkpoint_dir):
            raise TrainingError(
                f"A new training needs a folder without checkpoints, but {checkpoint_dir} holds some. "
                f"Resume from them, remove them, or choose another folder."
            )
        return None
    for folder in reversed(checkpoints(checkpoint_dir)):
        if (seal := _read_seal(folder)) is None:
            warnings.warn(f"{folder} is not complete, so training continues from an earlier step.", stacklevel=2)
            continue
        odd = [name for name in {**seal, **identity} if seal.get(name) != identity.get(name)]
        if odd:
            differences = ", ".join(
                f"{one_line(name, 40)} {one_line(seal.get(name), 12)} (now {one_line(identity.get(name), 12)})"
                for name in odd
            )
            raise TrainingError(
                f"To resume, recipe, rows and adapter must be the checkpoint's, but {folder} was made with others: "
                f"{differences}. Resume with the same options, or train into another folder."
            )
        return folder
    return None


@contextmanager
def explain_disk_errors(checkpoint_dir: Path | None) -> Iterator[None]:
    """Turn an error in writing a checkpoint into a one-line message with the way out."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = one_line(error, 200)
        if checkpoint_dir is None or (isinstance(error, RuntimeError) and "PytorchStreamWriter" not in reason):
            raise
        raise TrainingError(
            f"A checkpoint could not be written to {checkpoint_dir}: {reason}. "
            "Free some space and resume: the last whole checkpoint is kept."
        ) from error


class Stop:
    """A request to stop a training; calling it returns True once a signal came.

    Attributes:
        saved: A description of what is on disk; None if nothing is.
    """

    def __init__(self) -> None:
        self.saved: str | None = None
        self.signals: list[int] = []

    def __call__(self) -> bool:
        return bool(self.signals)


@contextmanager
def defer_stop(confirm: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """Delay SIGTERM and Ctrl-C: inside the context they only set the yielded request; at its end they take effect.

    Their exception gets a note on what was saved. A second Ctrl-C takes effect at once. Nothing changes in a thread,
    where handlers cannot be set, and for a signal that is ignored.

    Args:
        confirm: Called from the handler at the first Ctrl-C.
    """
    stop, before = Stop(), dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        before = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}

    def hold_back(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in stop.signals:
            stop.signals.clear()
            signal.signal(number, before[number])
            signal.raise_signal(number)
        stop.signals.append(number)
        if number == signal.SIGINT:
            confirm()

    try:
        for number in before:
            signal.signal(number, hold_back)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if stop.signals:
            try:
                signal.raise_signal(stop.signals[0])
            except BaseException as end:
                if stop.saved is not None:
                    end.add_note(stop.saved)
                raise
