"""What a path holds of ours, whether it is sound, and what to do where it is not. Nothing is changed.

An adapter, a basis, a basis model, a moments file, a LoRA export, a run, a run of many tenants, an evaluation, a
campaign, or a folder of these. A folder of ``frozencore calibrate`` is the moments in it, and the adapter and the
basis beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from frozencore.calibration.store import KEY
from frozencore.cli.verbs import LAB_MISSING
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import (
    BASIS_MODEL_TYPE,
    CONFIG_FILE,
    FACTORS_FILE,
    HEADER_FILE,
    MODEL_CONFIG,
    PEFT_TYPE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    read_config,
)
from frozencore.tune.run.files import ADAPTER, CHECKPOINTS, FAILURE, FOUND, MOMENTS_FILE, PREDICTIONS, RECORD
from frozencore.tune.training.checkpoints import SEATS


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
        kind: ``"adapter"``, ``"basis"``, ``"basis model"``, ``"moments"``, ``"LoRA"``, ``"run"``, ``"tenants"``,
            ``"evaluation"`` or ``"campaign"``; ``"runs"`` for a folder of such; None if it is not one of ours.
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
    return Diagnosis(path, kind, tuple(_examiner(kind)(path)) if kind else ())


def _examiner(kind: str) -> Callable[[Path], Iterator[Finding]]:
    """The function that looks; what only an adapter needs is not imported for a campaign."""
    for other in entry_points(group="frozencore.doctor", name=kind):
        found: Callable[[Path], Iterator[Finding]] = other.load()
        return found
    if kind == "campaign":
        return _needs_lab
    room = {
        "adapter": "adapter_findings", "basis": "adapter_findings", "basis model": "adapter_findings",
        "LoRA": "adapter_findings", "moments": "moments_findings",
    }  # fmt: skip
    module = import_module(f"frozencore.cli.{room.get(kind, 'run_findings')}")
    examiner: Callable[[Path], Iterator[Finding]] = getattr(module, kind.lower().replace(" ", "_"))
    return examiner


def _needs_lab(path: Path) -> Iterator[Finding]:
    yield Finding("campaign", f"not looked at: {LAB_MISSING}", sound=False)


def _kind_of(path: Path) -> str | None:
    kind = _kind_of_one(path)
    return "runs" if kind is None and any(things_in(path)) else kind


def things_in(path: Path) -> Iterator[Path]:
    """The folders in a folder that hold something of ours."""
    folders = sorted(path.iterdir()) if path.is_dir() else ()
    return (folder for folder in folders if folder.is_dir() and _kind_of_one(folder) is not None)


def _kind_of_one(path: Path) -> str | None:
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
    if _is_basis_model(path):
        return "basis model"
    if (path / MOMENTS_FILE).is_file():
        return "moments"
    record = read_json(path / RECORD)
    if isinstance(record, dict) and "scores" in record:
        return "evaluation"
    if record is None and _is_of_many(path):
        return "tenants"
    if (isinstance(record, dict) and "config" in record) or any((path / n).is_dir() for n in (CHECKPOINTS, FOUND)):
        return "run"
    if record is None and (path / ADAPTER / CONFIG_FILE).is_file():
        return "adapter"
    if any(path.glob(f"*/*/{PREDICTIONS}")):
        return "evaluation"
    return "run" if (path / RECORD).exists() and (path / PREDICTIONS).exists() else None


def _is_basis_model(path: Path) -> bool:
    config = read_json(path / MODEL_CONFIG)
    return isinstance(config, dict) and config.get("model_type") == BASIS_MODEL_TYPE


def _is_of_many(path: Path) -> bool:
    """Whether ``tune-many`` wrote it: tenants' records, failures alone, or checkpoints so far."""
    records = map(read_json, path.glob(f"*/{RECORD}"))
    return (
        any(isinstance(record, dict) and "company" in record for record in records)
        or any(path.glob(f"*/{FAILURE}"))
        or any(path.glob(f"checkpoints/*/{SEATS}"))
    )


def _may_be_moments(path: Path) -> bool:
    """A damaged file may be; one of something else is not."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            return KEY in metadata
    except (SafetensorError, OSError, ValueError):
        return True


def _kind_of_adapter(path: Path) -> str | None:
    try:
        kind = read_config(path).get("peft_type", PEFT_TYPE)
    except ArtifactError:
        return "adapter"
    return {PEFT_TYPE: "adapter", "LORA": "LoRA"}.get(kind) if isinstance(kind, str) else "adapter"


def inside(path: Path, name: str, examine: Callable[[Path], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of what lies in another thing."""
    for finding in examine(path):
        yield Finding(f"{name}: {finding.part}", finding.found, finding.sound)


def read_json(path: Path) -> Any:
    """A JSON file; None if it is missing, and the error where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return error
