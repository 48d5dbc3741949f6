"""The folder of many tenants: a folder for each tenant, which is written whole, and the results that stand in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from frozencore.errors import ArtifactError, TrainingError
from frozencore.files.atomic_write import require_writable
from frozencore.files.names import ADAPTER, CONFIG_FILE, HASHES, UNFINISHED_FOLDER, WEIGHTS_FILE
from frozencore.text import num_of, one_line
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import FAILURE, HASHED, RECORD, locked, record_of_run
from frozencore.tune.record import RecordedConfig, TunedRecord

_WAY_OUT = "Choose another --out, or move that folder away."
_GIVE_SAME = "Give the same, or choose another --out."


def refuse_taken(out: Path, names: Iterable[str], *, resume: bool) -> None:
    """Check before any work that the tenants of these names may be trained into the folder.

    A tenant's folder appears when its record is whole. A folder with other files belongs to somebody else.

    Raises:
        ArtifactError: The folder cannot be written, or a tenant's folder holds other files, or a record without
            ``resume``.
        TrainingError: Another process is running in a tenant's folder; or an earlier run left tenants between two
            steps, and ``resume`` is off.
    """
    require_writable(out)
    names = list(names)
    if not resume and (begun := unfinished_in(out, names)):
        raise TrainingError(
            f"{out} holds an interrupted run, which has kept the steps of {num_of(len(begun), 'tenant')}. Go on from "
            f"there with `tune-many --resume`, choose another --out, or remove {out / UNFINISHED_FOLDER}."
        )
    if alone := next((name for name in (RECORD, HASHES, f"{ADAPTER}/{CONFIG_FILE}") if (out / name).exists()), None):
        raise ArtifactError(f"{out} holds a run of its own ({alone}), not one of tenants. Choose another --out.")
    finished = []
    for name in names:
        names_in = files_in(out / name)
        if not names_in:
            continue
        with locked(out / name):
            if RECORD in names_in:
                finished.append(name)
            else:
                require_unused(out / name)
    if finished and not resume:
        raise ArtifactError(
            f"{out} already holds a finished run of {finished[0]!r} ({len(finished)} in all). Train the other tenants "
            "with --resume, choose another --out, or remove that folder."
        )


def unfinished_file(out: Path, name: str) -> Path:
    """The file of a tenant between two steps (:mod:`frozencore.tune.many.unfinished`)."""
    return out / UNFINISHED_FOLDER / f"{name}.safetensors"


def unfinished_in(out: Path, names: Iterable[str]) -> list[str]:
    """The tenants that an earlier run left between two steps."""
    return [name for name in names if unfinished_file(out, name).is_file()]


def require_unused(folder: Path) -> None:
    """Refuse a tenant's folder that holds anything but the failure of an earlier run."""
    names_in = files_in(folder)
    if names_in not in ([], [FAILURE]):
        raise ArtifactError(f"A tenant's folder is new, but {folder} holds {names_in[0]!r}. {_WAY_OUT}")


def files_in(folder: Path) -> list[str]:
    """The names in a folder; empty if it does not exist."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def standing_record(folder: Path, config: RunConfig, hashes: Mapping[str, str]) -> TunedRecord | None:
    """The record of this run in a tenant's folder; None without a record.

    Args:
        config: The tenant's configuration.
        hashes: Those of this run: of the base model, its configuration, and the training and evaluation rows.

    Raises:
        ArtifactError: The record is damaged, has no adapter, or is that of a run with other rows, another base model or
            other options.
    """
    if not (folder / RECORD).exists():
        return None
    record = record_of_run(folder / ADAPTER)
    if not isinstance(record, TunedRecord) or not (folder / ADAPTER / WEIGHTS_FILE).is_file():
        raise ArtifactError(f"{folder / RECORD} is damaged, or has no adapter. {_WAY_OUT}")
    recorded = {name: getattr(record.hashes, name) for name in {*hashes, "start"}}
    now = resume_key(RecordedConfig.of(config), hashes)
    refuse_differing(f"that in {folder}", resume_key(record.config, recorded), now)
    return record


def require_basis(folder: Path, record: TunedRecord, basis: str) -> None:
    """Refuse a record of a core on another basis."""
    refuse_differing(f"that in {folder}", {"basis": record.hashes.basis}, {"basis": basis})


def refuse_differing(
    what: str, recorded: Mapping[str, Any], now: Mapping[str, Any], *, way_out: str = _GIVE_SAME
) -> None:
    """Refuse results of another run; the message names each option and hash that differs."""
    odd = [name for name in {**recorded, **now} if recorded.get(name) != now.get(name)]
    if odd:
        values = ", ".join(
            f"{one_line(name, 40)} {one_line(recorded.get(name), 32)} (now {one_line(now.get(name), 32)})"
            for name in odd
        )
        raise ArtifactError(
            f"Results in --out are kept if rows, basis, base model and options are this run's, but {what} differs: "
            f"{values}. {way_out}"
        )


def resume_key(config: RecordedConfig, hashes: Mapping[str, str | None]) -> dict[str, Any]:
    """The options that a resumed run must share, and the hashes of the files that they name, by name."""
    content = config.content()
    options: dict[str, Any] = {"on a named basis": content.get("basis") is not None}
    for name, value in content.items():
        if name not in HASHED:
            options |= value if isinstance(value, dict) else {name: value}
    return options | {f"hash of {name}": digest for name, digest in hashes.items()}
