"""``frozencore doctor``: show the content of a path and its faults, as a table and an exit status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from frozencore.cli import findings
from frozencore.cli.console import console
from frozencore.cli.findings import Finding, Findings
from frozencore.cli.saved_kinds import kind_of, saved_in
from frozencore.cli.verbs import LAB_MISSING
from frozencore.errors import FrozenCoreError
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
    folders = tuple(_in_a_line(diagnose(folder)) for folder in saved_in(path))
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
