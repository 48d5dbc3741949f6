"""Check saved things and say how to fix them: one function for each kind.

A function yields findings, and other saved things inside its own. It may raise the errors of the reader it uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frozencore.files.adapter_folder import CONFIG_FILE
from frozencore.tune.run.record import TunedRecord, read_record
from frozencore.tune.run.run_folder import (
    ADAPTER,
    BASIS,
    CHECKPOINTS,
    FAILURE,
    MOMENTS_FILE,
    PREDICTIONS,
    RECORD,
    kept_of,
)
from frozencore.words import one_line

ACCURACY_ROUNDING = 1e-9
BOTH = "weights and configuration"


@dataclass(frozen=True)
class Finding:
    """One check: the part, the result, and whether the part is sound."""

    part: str
    found: str
    sound: bool = True


@dataclass(frozen=True)
class Inside:
    """A saved thing inside another.

    Attributes:
        only_wrong: Leave out its sound parts.
    """

    path: Path
    kind: str
    name: str
    only_wrong: bool = False


Findings = Iterator[Finding | Inside]


def adapter(path: Path) -> Findings:
    if not (path / CONFIG_FILE).exists() and (path / ADAPTER / CONFIG_FILE).is_file():
        yield from _beside(path)
        return
    from frozencore.adapter.saved.folder import read_adapter

    config, layers = read_adapter(path)
    num_values = sum(factors.R.numel() for factors in layers.values()) // config.rounds
    yield Finding(BOTH, f"{len(layers)} layers, {num_values:,} trained values, all finite")
    calibrated = any(bool(factors.P.any()) for factors in layers.values())
    never = "zero: it was never calibrated and changes nothing. Call frozencore.calibrate and save it again."
    yield Finding(
        "bases", f"{config.constructor}, in {config.coordinates} coordinates" if calibrated else never, calibrated
    )
    seal = config.seal or {}
    sealed = "hashes agree" if seal.get("weights_sha256") else "none: changes since it was saved go unnoticed"
    yield Finding("seal", sealed)
    if config.basis_id is not None:
        yield Finding("basis", f"{config.basis_id[:12]}, found; it records the base model")
    else:
        yield _base_model(config.base_model_name_or_path, seal.get("base"))


def _base_model(name: str | None, recorded: object) -> Finding:
    known = "its weights are recorded" if recorded else "its weights are not recorded: any model of its shape fits"
    return Finding("base model", f"made on {name or 'a model without a name'}; {known}")


def _beside(path: Path) -> Findings:
    """Examine the adapter and the basis in a folder of ``frozencore calibrate``."""
    yield Inside(path / ADAPTER, "adapter", ADAPTER)
    if (path / BASIS).is_dir():
        yield Inside(path / BASIS, "basis", BASIS)


def basis(path: Path) -> Findings:
    from frozencore.adapter.saved.saved_basis import load_basis

    basis = load_basis(path)
    calibrated_on = f", calibrated on {basis.calibrated_on}" if basis.calibrated_on else ""
    yield Finding("factors and header", f"{len(basis.layers)} layers, all finite; hashes agree")
    yield Finding("identity", f"{basis.identity[:12]}, {basis.options.get('constructor')}{calibrated_on}")
    yield _base_model(basis.base_model, basis.base)


def basis_model(path: Path) -> Findings:
    from frozencore.adapter.export.basis_model import identity_of, read_bases, read_entry

    entry, layers = read_entry(path), read_bases(path)
    yield Finding(BOTH, f"{len(layers)} layers with a basis, all finite")
    same = identity_of(layers) == entry["identity"]
    changed = "P and Q have changed since the model was written: export it again"
    yield Finding("identity", entry["identity"][:12] if same else changed, same)


def lora(path: Path) -> Findings:
    from frozencore.adapter.export.serving import NO_TENANT, check_lora_directory
    from frozencore.adapter.saved.seal import read_folder

    read_folder(path)
    report = check_lora_directory(path)
    engines = ", ".join(report.engines) or "no engine"
    tenant = ", on its basis model: it is a tenant" if report.is_tenant else ""
    yield Finding(BOTH, f"rank {report.rank}; taken by {engines}{tenant}")
    for problem in report.problems:
        if problem.rule != NO_TENANT:
            yield Finding(problem.rule, str(problem), sound=False)


def other_method(path: Path) -> Findings:
    """Examine the adapter of another PEFT method."""
    from frozencore.adapter.saved.seal import read_folder

    values, tensors = read_folder(path)
    yield Finding(BOTH, f"{values.get('peft_type')}, {len(tensors)} tensors, all finite")


def moments(path: Path) -> Findings:
    """Examine a moments file, or the folder that ``frozencore calibrate`` wrote."""
    from frozencore.calibration.moments_file import load_moments

    layers = load_moments(path / MOMENTS_FILE if path.is_dir() else path)
    counts = [layer.num_tokens for layer in layers.values()]
    names = sorted({name for layer in layers.values() for name in layer.names()})
    said = f"{len(layers)} layers, {', '.join(names)}; {min(counts, default=0):,} tokens"
    counted = min(counts, default=0) > 0
    yield Finding("moments", said if counted else f"{said}: nothing was counted. Calibrate again.", counted)
    if path.is_dir():
        yield from _beside(path)


def run(path: Path) -> Findings:
    """Examine the record, the predictions and the adapter of a run."""
    if not (path / RECORD).exists():
        kept = kept_of(path)
        way_on = f"go on from {kept} with --resume" if kept else "run it again"
        yield Finding(RECORD, f"missing: the run was interrupted; {way_on}.", sound=False)
        return
    try:
        record = read_record((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        damage = f"damaged ({one_line(error)}): it is no record of a run. Remove the folder and run it again."
        yield Finding(RECORD, damage, sound=False)
        return
    if not isinstance(record, TunedRecord):
        yield Finding(RECORD, "how near two bases are")
        return
    yield Finding(RECORD, f"{record.method} on {record.task or record.config.sources}")
    if record.has("accuracy"):
        yield _counted_again(path / PREDICTIONS, record.accuracy)
    if (path / ADAPTER).exists():
        has_bases = record.hashes is not None and record.hashes.basis is not None
        yield Inside(path / ADAPTER, "adapter" if has_bases else "other method", ADAPTER)


def tenants(path: Path) -> Findings:
    """Count the tenants and report those that diverged or have a fault."""
    if (path / CHECKPOINTS).is_dir():
        said = "not all have ended: the run was interrupted; the same command goes on with --resume."
        yield Finding("tenants", said, sound=False)
    folders = sorted({file.parent for name in (RECORD, FAILURE) for file in path.glob(f"*/{name}")})
    trained = [folder for folder in folders if (folder / RECORD).exists()]
    diverged = [folder.name for folder in folders if folder not in trained]
    yield Finding("tenants", f"{len(trained)} with a record and an adapter")
    if diverged:
        yield Finding(FAILURE, f"diverged: {', '.join(diverged)}. Train them again at a lower rate.", sound=False)
    yield from (Inside(folder, "run", folder.name, only_wrong=True) for folder in trained)


def evaluation(path: Path) -> Findings:
    """Examine the record of an evaluation and each of its scores."""
    total = read_json(path / RECORD)
    if not (isinstance(total, dict) and isinstance(total.get("scores"), list)):
        again = "missing or damaged: run the same `frozencore evaluate` again, finished tasks are kept."
        yield Finding(RECORD, again, sound=False)
    elif total.get("failed"):
        failed = ", ".join(map(str, total["failed"]))
        yield Finding(RECORD, f"not scored: {failed}. Its `failed` says why.", sound=False)
    for predictions in sorted(path.glob(f"*/*/{PREDICTIONS}")):
        name, score = str(predictions.parent.relative_to(path)), read_json(predictions.parent / RECORD)
        if not isinstance(score, dict):
            yield Finding(name, f"{RECORD} is missing or damaged: evaluate again, it is scored again.", sound=False)
        elif "metric" not in score and score.get("accuracy", 0) is not None:  # not an average or a loss on other rows
            yield _counted_again(predictions, score.get("accuracy"), name)


def _counted_again(path: Path, recorded: Any, part: str = PREDICTIONS) -> Finding:
    """Check that the stored predictions give the stored accuracy."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        correct = [row["prediction"] == row["gold"] for row in rows]
        contradicted = [row["correct"] for row in rows] != correct
        share = sum(correct) / len(correct)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
        return Finding(part, f"{path.name} is missing or damaged. Score again.", sound=False)
    is_share = isinstance(recorded, int | float) and 0 <= recorded <= 1
    if not is_share or abs(share - recorded) > ACCURACY_ROUNDING:
        said = f"{share:.4f} by the predictions, {recorded!r:.40} recorded: changed. Score again."
        return Finding(part, said, sound=False)
    if contradicted:
        return Finding(part, "a row's `correct` is not what it predicts: changed. Score again.", sound=False)
    return Finding(part, f"{len(rows)} rows give the recorded accuracy, {share:.4f}")


def read_json(path: Path) -> Any:
    """Read a JSON file; return None if it is missing, and the error if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return error
