"""What a path holds of ours, whether it is sound, and what to do where it is not. Nothing is changed.

An adapter, a basis, a moments file, a LoRA export, a run, an evaluation, or a campaign. A folder of ``frozencore
calibrate`` is the moments in it, and the adapter and the basis beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from frozencore.adapter.directory import read_adapter
from frozencore.adapter.export.serving import check_lora_directory
from frozencore.adapter.seal.integrity import (
    CONFIG_FILE,
    PEFT_TYPE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    read_config,
    read_folder,
)
from frozencore.adapter.seal.saved_basis import FACTORS_FILE, HEADER_FILE, load_basis
from frozencore.calibration.store import KEY, load_moments
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.lab.campaign.results import load_results
from frozencore.lab.campaign.store import INDEX, RECORD, Store
from frozencore.lab.run.calibrating import MOMENTS_FILE
from frozencore.lab.run.record import TunedRecord, read_record
from frozencore.lab.training.checkpoints import checkpoints, is_complete
from frozencore.one_line import one_line

ACCURACY_ROUNDING = 1e-9
PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, what was found, and whether it is as it must be."""

    part: str
    found: str
    sound: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """What a path is, and what was found there.

    Attributes:
        kind: ``"adapter"``, ``"basis"``, ``"moments"``, ``"LoRA"``, ``"run"``, ``"evaluation"`` or ``"campaign"``; None
            if it is not one of ours.
    """

    path: Path
    kind: str | None
    findings: tuple[Finding, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.kind is not None and all(finding.sound for finding in self.findings)


def diagnose(path: Path) -> Diagnosis:
    """Look at a path; what is wrong there is a finding, not an error."""
    kind = _kind_of(path)
    return Diagnosis(path, kind, tuple(_EXAMINERS[kind](path)) if kind else ())


def _kind_of(path: Path) -> str | None:
    if path.is_file():
        return "moments" if path.suffix == ".safetensors" and _may_be_moments(path) else None
    if not path.is_dir():
        return None
    if (path / "campaign.json").is_file():
        return "campaign"
    if any((path / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE)):
        return _kind_of_adapter(path)
    if any((path / name).exists() for name in (HEADER_FILE, FACTORS_FILE)):
        return "basis"
    if (path / MOMENTS_FILE).is_file():
        return "moments"
    record = _read_record(path / RECORD)
    if isinstance(record, dict) and "scores" in record:
        return "evaluation"
    if (isinstance(record, dict) and "config" in record) or (path / "checkpoints").is_dir():
        return "run"
    if (path / "adapter" / CONFIG_FILE).is_file():
        return "run"
    if any(path.glob(f"*/*/{PREDICTIONS}")):
        return "evaluation"
    return "run" if (path / RECORD).exists() and (path / PREDICTIONS).exists() else None


def _may_be_moments(path: Path) -> bool:
    """A damaged file may be; one of something else is not."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return KEY in metadata or metadata.get("format", "").startswith(KEY)
    except (SafetensorError, OSError, ValueError):
        return True


def _kind_of_adapter(path: Path) -> str | None:
    try:
        kind = read_config(path).get("peft_type", PEFT_TYPE)
    except ArtifactError:
        return "adapter"
    return {PEFT_TYPE: "adapter", "LORA": "LoRA"}.get(kind) if isinstance(kind, str) else "adapter"


def _adapter(path: Path) -> Iterator[Finding]:
    try:
        config, factors = read_adapter(path)
    except FrozenCoreError as error:
        yield Finding("weights and configuration", _line(error), sound=False)
        return
    num_values = sum(f.R.numel() for f in factors.values())
    yield Finding("weights and configuration", f"{len(factors)} layers, {num_values:,} trained values, all finite")
    calibrated = any(bool(f.P.any()) for f in factors.values())
    yield Finding(
        "bases",
        f"of {config.constructor}, in {config.coordinates} coordinates"
        if calibrated
        else "zero: it was never calibrated and changes nothing. Call frozencore.calibrate and save it again.",
        calibrated,
    )
    seal = config.seal or {}
    yield Finding(
        "seal", "hashes agree" if seal.get("weights_sha256") else "none: changes since it was saved go unseen"
    )
    if config.basis_id is not None:
        yield Finding("basis", f"{config.basis_id[:12]}, found; it records the base model")
        return
    base = f"made on {config.base_model_name_or_path or 'a model without a name'}"
    yield Finding("base model", f"{base}, {'recorded' if seal.get('base') else 'not recorded: any of its shape fits'}")


def _basis(path: Path) -> Iterator[Finding]:
    try:
        basis = load_basis(path)
    except FrozenCoreError as error:
        yield Finding("factors and header", _line(error), sound=False)
        return
    yield Finding("factors and header", f"{len(basis.layers)} layers, all finite; hashes agree")
    of = f", calibrated on {basis.calibrated_on}" if basis.calibrated_on else ""
    yield Finding("identity", f"{basis.identity[:12]}, of {basis.options.get('constructor')}{of}")
    base = f"made on {basis.base_model or 'a model without a name'}"
    yield Finding("base model", f"{base}, {'recorded' if basis.base else 'not recorded: any of its shape fits'}")


def _moments(path: Path) -> Iterator[Finding]:
    file = path / MOMENTS_FILE if path.is_dir() else path
    try:
        moments = load_moments(file)
    except FrozenCoreError as error:
        yield Finding(file.name, _line(error), sound=False)
    else:
        counts = [layer.num_tokens for layer in moments.values()]
        names = sorted({name for layer in moments.values() for name in layer.names()})
        counted = bool(counts) and min(counts) > 0
        said = f"{len(moments)} layers, {', '.join(names)}; {min(counts, default=0):,} tokens"
        yield Finding(file.name, said if counted else f"{said}: nothing was counted. Calibrate again.", counted)
    if path.is_dir():
        yield from _inside(path / "adapter", "adapter", _adapter)
        if (path / "basis").is_dir():
            yield from _inside(path / "basis", "basis", _basis)


def _lora(path: Path) -> Iterator[Finding]:
    try:
        read_folder(path)
        report = check_lora_directory(path)
    except FrozenCoreError as error:
        yield Finding("weights and configuration", _line(error), sound=False)
        return
    yield Finding(
        "weights and configuration", f"rank {report.rank}; taken by {', '.join(report.engines) or 'no engine'}"
    )
    for problem in report.problems:
        yield Finding(problem.rule, str(problem), sound=False)


def _run(path: Path) -> Iterator[Finding]:
    if not (path / RECORD).exists():
        whole = [folder.name for folder in checkpoints(path / "checkpoints") if is_complete(folder)]
        way_on = f"go on from {sorted(whole, key=len)[-1]} with --resume" if whole else "run it again"
        yield Finding(RECORD, f"missing: the run was interrupted; {way_on}.", sound=False)
        return
    try:
        record = read_record((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        damage = f"damaged ({_line(error)}): it is no record of a run. Remove the folder and run it again."
        yield Finding(RECORD, damage, sound=False)
        return
    if not isinstance(record, TunedRecord):
        yield Finding(RECORD, "how near two bases are")
        return
    yield Finding(RECORD, f"{record.method} on {record.task or record.config.data}")
    if record.has("accuracy"):
        yield _rescored(path / PREDICTIONS, record.accuracy)
    if (path / "adapter").exists():
        of_baseline = record.hashes is None or record.hashes.basis is None
        yield from _inside(path / "adapter", "adapter", _baseline if of_baseline else _adapter)


def _baseline(path: Path) -> Iterator[Finding]:
    try:
        values, tensors = read_folder(path)
        yield Finding("weights and configuration", f"{values.get('peft_type')}, {len(tensors)} tensors, all finite")
    except FrozenCoreError as error:
        yield Finding("weights and configuration", _line(error), sound=False)


def _evaluation(path: Path) -> Iterator[Finding]:
    total = _read_record(path / RECORD)
    if not (isinstance(total, dict) and isinstance(total.get("scores"), list)):
        yield Finding(
            RECORD,
            "missing or damaged: run the same `frozencore evaluate` again, finished tasks are kept.",
            sound=False,
        )
    elif total.get("failed"):
        yield Finding(
            RECORD, f"not scored: {', '.join(map(str, total['failed']))}. Its `failed` says why.", sound=False
        )
    for predictions in sorted(path.glob(f"*/*/{PREDICTIONS}")):
        place = predictions.parent
        name = str(place.relative_to(path))
        score = _read_record(place / RECORD)
        if not isinstance(score, dict):
            yield Finding(name, f"{RECORD} is missing or damaged: evaluate again, it is scored again.", sound=False)
        elif "metric" not in score:  # of lm-evaluation-harness: its own averages
            yield _rescored(predictions, score.get("accuracy"), name)


def _campaign(path: Path) -> Iterator[Finding]:
    try:
        store = Store(path)
        results = load_results(path)
        campaign = store.campaign()
    except (FrozenCoreError, RecursionError) as error:
        yield Finding("campaign", _line(error), sound=False)
        return
    runs = [run for study in results.studies for run in study.runs]
    failed, missing = [run for run in runs if run.failure is not None], [run for run in runs if run.record is None]
    yield Finding("campaign", f"{campaign.name}: {len(runs) - len(missing)} of {len(runs)} final runs are there")
    if failed:
        reasons = sorted({run.failure.reason for run in failed if run.failure is not None})
        yield Finding(
            "failed runs",
            f"{len(failed)} ({', '.join(reasons)}): see {path}/failed, then `frozencore campaign run --retry-failed`.",
            sound=False,
        )
    left = len(missing) - len(failed)
    if left > 0:
        yield Finding("open runs", f"{left}: `frozencore campaign run` with the same file goes on.", sound=False)
    for folder in sorted(p for p in (path / "runs").glob("*") if p.is_dir() and not p.name.startswith(".")):
        if not isinstance(_read_record(folder / RECORD), dict):
            yield Finding(
                folder.name,
                f"{RECORD} is missing or damaged: remove {folder} and {INDEX}, it is made again.",
                sound=False,
            )


def _rescored(path: Path, recorded: Any, part: str = PREDICTIONS) -> Finding:
    """Whether the stored predictions give the stored accuracy."""
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


def _inside(path: Path, name: str, examine: Callable[[Path], Iterator[Finding]]) -> Iterator[Finding]:
    for finding in examine(path):
        yield Finding(f"{name}: {finding.part}", finding.found, finding.sound)


def _read_record(path: Path) -> Any:
    """A JSON file; None if it is missing, and the error where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return error


def _line(error: Exception) -> str:
    return one_line(error)


_EXAMINERS: Mapping[str, Callable[[Path], Iterator[Finding]]] = {
    "adapter": _adapter, "basis": _basis, "moments": _moments, "LoRA": _lora, "run": _run, "evaluation": _evaluation,
    "campaign": _campaign,
}  # fmt: skip
