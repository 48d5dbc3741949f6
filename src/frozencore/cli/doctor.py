"""``frozencore doctor``: recognise what frozencore has saved at a path, and show its faults, with an exit status.

It is an adapter, a basis, a basis model, a moments file, a LoRA, a run, a run of many tenants, an evaluation or a
campaign. A folder of ``frozencore calibrate`` counts as moments, with the adapter and the basis beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open

from frozencore.calibration.moments_file import KEY
from frozencore.cli import findings
from frozencore.cli.console import console
from frozencore.cli.findings import Finding, Findings, read_json
from frozencore.cli.verbs import LAB_MISSING
from frozencore.errors import ArtifactError, FrozenCoreError
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
from frozencore.tune.run.run_folder import ADAPTER, CACHE, CHECKPOINTS, FAILURE, MOMENTS_FILE, PREDICTIONS, RECORD
from frozencore.tune.training.checkpoints import TENANT_STATES
from frozencore.words import one_line

HEALTHY, WRONG, NOTHING = 0, 1, 2


def doctor(
    path: Annotated[
        Path,
        typer.Argument(help="An adapter, a basis (model), a moments file, a LoRA, a run, an evaluation or a campaign."),
    ],
) -> None:
    diagnosis = diagnose(path)
    if diagnosis.kind is None:
        what = "holds nothing of frozencore" if path.exists() else "does not exist"
        known = "an adapter, a basis, a moments file, a LoRA, a run, an evaluation or a campaign"
        console.print(f"{path} {what}. Name {known}.", soft_wrap=True)
        raise typer.Exit(NOTHING)
    table = Table(title=Text(one_line(f"{path}: {diagnosis.kind}")), title_justify="left")
    for heading in ("", "part", "found"):
        table.add_column(heading)
    for finding in diagnosis.findings:
        mark = Text("sound", style="green") if finding.sound else Text("wrong", style="red")
        table.add_row(mark, Text(one_line(finding.part)), Text(one_line(finding.found)))
    console.print(table)
    raise typer.Exit(HEALTHY if diagnosis.healthy else WRONG)


@dataclass(frozen=True)
class Diagnosis:
    """The kind of a path, and the findings there.

    Attributes:
        kind: A key of ``EXAMINERS``, ``"campaign"``, or ``"runs"`` for a folder of several things; None if
            frozencore wrote nothing there.
    """

    path: Path
    kind: str | None
    findings: tuple[Finding, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.kind is not None and all(finding.sound for finding in self.findings)


def diagnose(path: Path) -> Diagnosis:
    """Examine a path without changing it; a fault is a finding, not an error."""
    kind = kind_of(path)
    if kind is not None:
        return Diagnosis(path, kind, tuple(_examine(path, kind)))
    inside = sorted(path.iterdir()) if path.is_dir() else ()
    saved = (folder for folder in inside if folder.is_dir() and kind_of(folder) is not None)
    folders = tuple(_in_a_line(diagnose(folder)) for folder in saved)
    return Diagnosis(path, "runs" if folders else None, folders)


def _in_a_line(diagnosis: Diagnosis) -> Finding:
    """Summarise one thing in a folder of several: its kind, and its first fault."""
    wrong = [finding for finding in diagnosis.findings if not finding.sound]
    said = [f"{finding.part}: {finding.found}" for finding in wrong] or [each.found for each in diagnosis.findings]
    return Finding(diagnosis.path.name, ": ".join([str(diagnosis.kind), *said[:1]]), not wrong)


def _examine(path: Path, kind: str) -> Iterator[Finding]:
    """Yield the findings of one thing and its contents; an error of its reader is a finding about its main part."""
    part, examiner = EXAMINERS.get(kind, (kind, _needs_lab))
    for other in entry_points(group="frozencore.doctor", name=kind):
        examiner = other.load()
    try:
        for found in examiner(path):
            if isinstance(found, Finding):
                yield found
                continue
            for inner in _examine(found.path, found.kind):
                if not (inner.sound and found.only_wrong):
                    yield Finding(f"{found.name}: {inner.part}", inner.found, inner.sound)
    except FrozenCoreError as error:
        yield Finding(part, one_line(error), sound=False)


def _needs_lab(path: Path) -> Findings:
    yield Finding("campaign", f"not looked at: {LAB_MISSING}", sound=False)


EXAMINERS: dict[str, tuple[str, Callable[[Path], Findings]]] = {
    "adapter": (findings.BOTH, findings.adapter),
    "basis": ("factors and header", findings.basis),
    "basis model": (findings.BOTH, findings.basis_model),
    "LoRA": (findings.BOTH, findings.lora),
    "other method": (findings.BOTH, findings.other_method),
    "moments": ("moments", findings.moments),
    "run": ("result.json", findings.run),
    "tenants": ("tenants", findings.tenants),
    "evaluation": ("evaluation", findings.evaluation),
}
"""For each kind: its main part, which gets the errors of its reader, and the function that examines it."""


def kind_of(path: Path) -> str | None:
    """The kind of a path, such as ``"adapter"`` or ``"run"``; None if frozencore wrote nothing there."""
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
    model, record = read_json(path / MODEL_CONFIG), read_json(path / RECORD)
    if isinstance(model, dict) and model.get("model_type") == BASIS_MODEL_TYPE:
        return "basis model"
    if (path / MOMENTS_FILE).is_file():
        return "moments"
    if isinstance(record, dict) and "scores" in record:
        return "evaluation"
    if record is None and _is_of_many(path):
        return "tenants"
    if (isinstance(record, dict) and "config" in record) or any((path / n).is_dir() for n in (CHECKPOINTS, CACHE)):
        return "run"
    if record is None and (path / ADAPTER / CONFIG_FILE).is_file():
        return "adapter"
    if any(path.glob(f"*/*/{PREDICTIONS}")):
        return "evaluation"
    return "run" if record is not None and (path / PREDICTIONS).exists() else None


def _is_of_many(path: Path) -> bool:
    """Return whether ``tune-many`` wrote it: it has records of tenants, failures only, or checkpoints."""
    records = map(read_json, path.glob(f"*/{RECORD}"))
    return (
        any(isinstance(record, dict) and "company" in record for record in records)
        or any(path.glob(f"*/{FAILURE}"))
        or any(path.glob(f"checkpoints/*/{TENANT_STATES}"))
    )


def _may_be_moments(path: Path) -> bool:
    """Return whether a file holds moments; True if it cannot be read."""
    try:
        with safe_open(path, framework="numpy") as file:
            return KEY in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return True


def _kind_of_adapter(path: Path) -> str | None:
    try:
        kind = read_config(path).get("peft_type", PEFT_TYPE)
    except ArtifactError:
        return "adapter"
    return {PEFT_TYPE: "adapter", "LORA": "LoRA"}.get(kind) if isinstance(kind, str) else "adapter"
