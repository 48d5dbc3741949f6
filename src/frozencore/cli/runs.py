"""What ``tune``, ``tune-many`` and ``calibrate`` do once their options are checked. It imports torch and PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group
from rich.text import Text

from frozencore.calibration.calibrate import Calibration
from frozencore.cli.display import console, table_of
from frozencore.cli.inspect import calibration_summary
from frozencore.cli.run_screen import of_setup, of_start, run_summary, sample_lines, size_lines
from frozencore.cli.stages import StageDisplay
from frozencore.errors import FrozenCoreError, RankError
from frozencore.files.names import ADAPTER, BASIS
from frozencore.quiet import collect_warnings
from frozencore.text import bytes_in_words, num_of
from frozencore.tune.calibrate_only import execute_calibration
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import FIGURE, RECORD, SAMPLES
from frozencore.tune.many.finisher import TenantOutcome
from frozencore.tune.many.run import execute_many
from frozencore.tune.process_group import process_group
from frozencore.tune.processes import is_first, num_started, own_number
from frozencore.tune.record import Failure, TunedRecord
from frozencore.tune.run import execute


def tune(config: RunConfig, output: Path, progress: StageDisplay, *, resume: bool) -> TunedRecord:
    """Train, score and save one adapter; several processes share the work."""
    with process_group(config.model.device):
        return execute(config, output, progress, resume=resume)


def print_run(record: TunedRecord, output: Path) -> None:
    """Print the warnings, the gain, the cost, the samples and the files of a run."""
    for warning in record.warnings:
        console.print(f"Warning: {warning}", style="yellow")
    console.print(run_summary(record))
    if (output / SAMPLES).is_file():
        console.print(Group(*sample_lines(output / SAMPLES)))
    for line in size_lines(output / ADAPTER):
        console.print(line, soft_wrap=True)
    console.print(f"Adapter: {output / ADAPTER}   Record: {output / RECORD}   Curve: {output / FIGURE}", soft_wrap=True)


def tune_many(
    config: RunConfig, output: Path, progress: StageDisplay, *, slots: int, resume: bool
) -> dict[str, TenantOutcome]:
    """Train all tenants, of several processes each its share."""
    try:
        return execute_many(config, output, progress, num_slots=slots, resume=resume)
    except FrozenCoreError as error:
        if is_first():
            raise
        raise RankError(f"Process {own_number() + 1} of {num_started()}: {error}") from error


def print_tenants(outcomes: Mapping[str, TenantOutcome], output: Path) -> bool:
    """Print the warnings, gains, failures and files of tenants; return whether all succeeded."""
    records = {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, Failure)}
    failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
    for warning in dict.fromkeys(warning for record in records.values() for warning in record.warnings):
        console.print(f"Warning: {warning}", style="yellow")
    console.print(_tenants(records, failures))
    console.print(f"Adapters: {output}/NAME/adapter   Records: {output}/NAME/result.json", soft_wrap=True)
    if any(record.resolved.prompt_style == "chat" for record in records.values()):
        console.print("The prompts were put into the model's chat template: ask an engine at /v1/chat/completions.")
    return not failures


def _tenants(records: Mapping[str, TunedRecord], failures: Mapping[str, Failure]) -> Group:
    """Show the gain of each tenant, and their cost together."""
    cells: list[tuple[str, ...]] = []
    for name, record in records.items():
        rows, steps = record.rows.trained, str(record.training.num_steps)
        if record.selection is not None and record.selection.kept_step != record.training.num_steps:
            steps = f"{record.selection.kept_step} of {steps}"
        losses = (record.held_out_loss_before, record.held_out_loss)
        shown = ("" if loss is None else f"{loss:.3f}" for loss in losses)
        cells.append((name, str(rows), steps, *shown, f"{record.training_s:.1f}"))
    cells += [(name, "", "", "", failure.reason, "") for name, failure in failures.items()]
    lines = [Text(f"{name}: {failure.message}") for name, failure in failures.items()]
    if records:
        first, *_ = records.values()
        lines += map(Text, of_start(first))
        lines.append(
            Text(
                f"{first.num_trainable:,} trained values each; {of_setup(first)}, "
                f"training {sum(record.training_s for record in records.values()):.1f} s together, "
                f"peak memory {bytes_in_words(max(record.peak_memory_bytes for record in records.values()))}"
            )
        )
    headings = ("tenant", "rows", "steps", "held-out loss before", "after", "share, s")
    title = f"{num_of(len(cells), 'tenant')} on one basis"
    return Group(table_of(title, headings, cells, names=("tenant",)), *lines)


def calibrate(
    config: RunConfig, output: Path, progress: StageDisplay, *, of_tenants: bool
) -> tuple[Calibration, list[str]]:
    """Calibrate a basis and save it; several processes share the rows.

    Returns:
        The calibration, and its warnings.
    """
    with collect_warnings() as messages, process_group(config.model.device):
        calibration = execute_calibration(config, output, progress, of_tenants=of_tenants)
    return calibration, messages


def print_calibration(calibration: Calibration, caught: list[str], output: Path, *, every_layer: bool) -> None:
    """Print the warnings, the result and the files of a calibration."""
    for warning in caught:
        console.print(f"Warning: {warning}", style="yellow")
    console.print(calibration_summary(calibration, every_layer=every_layer))
    console.print(f"Basis: {output / BASIS}   Adapter: {output / ADAPTER}", soft_wrap=True)
