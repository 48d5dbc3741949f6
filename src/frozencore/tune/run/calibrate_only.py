"""Calibrate without training: bases for later runs, also one that fits many tenants, or a saved one made wider."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from peft import PeftModel

from frozencore.adapter.bases.access import save_basis
from frozencore.adapter.bases.calibrate import Calibration, calibrate
from frozencore.adapter.bases.grow import grow_basis
from frozencore.adapter.saved.saved_basis import read_header
from frozencore.calibration.batches import Batch
from frozencore.calibration.moments_file import MomentsFingerprint, save_moments
from frozencore.errors import ConfigError, DataError
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.row_sources import STANDARD_INPUT, read_source
from frozencore.tune.run.adapt import on_named_basis
from frozencore.tune.run.basis_fit import collect_for
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.make_record import calibrated_on
from frozencore.tune.run.many.tenant_rows import read_each
from frozencore.tune.run.many.tenants import find_tenants
from frozencore.tune.run.models import resolve_targets
from frozencore.tune.run.prepare import PreparedRun, calibration_batches, prepare
from frozencore.tune.run.read_rows import draw_rank
from frozencore.tune.run.run_folder import ADAPTER, BASIS, MOMENTS_FILE, RECORD, require_new
from frozencore.words import Progress, num_of, one_line

FEWEST_ROWS = 2


def execute_calibration(config: RunConfig, out: Path, progress: Progress) -> Calibration:
    """Write ``out/moments.safetensors``, ``out/adapter`` with zero cores, and ``out/basis`` for many adapters.

    With a memory budget no moments file is written, because the budget avoids holding the sums of all layers.

    Raises:
        ConfigError: The method reads no data, or there are several calibration tasks.
        ArtifactError: ``out`` holds a finished run or a calibration already.
    """
    if not config.moments_needed:
        raise ConfigError(f"The method {config.method!r} reads no calibration data: `frozencore tune` is all it needs.")
    if config.has_groups:
        raise ConfigError(
            "The moments of a folder are those of one set of rows, but --calibration-task names several. Give one, or "
            "--tenants with a file for each."
        )
    require_new(out, RECORD, MOMENTS_FILE if config.memory_budget is None else ADAPTER)
    prepared = prepare(config, progress)
    targets = resolve_targets(config, prepared.model)
    batches = calibration_batches(prepared.rows.calibration, prepared.encoder.pad_id)
    fingerprint = MomentsFingerprint.of(prepared.model, batches, config.calibration_options)
    model = config.method_entry.add(prepared.model, config.adapter_options(targets))
    needs = config.moments_needed | CAPTURE_NEEDS  # inspect reads G, a and d
    started = time.perf_counter()
    moments = None
    if config.memory_budget is None:
        moments = collect_for(config, model, batches, needs, progress)
    collect_s = time.perf_counter() - started
    calibration = calibrate(model, batches, options=config.calibration_options, moments=moments, progress=progress)
    calibration = replace(calibration, collect_s=calibration.collect_s + collect_s)
    _write(config, model, out, calibrated_on(config, prepared, calibration))
    if moments is not None:
        save_moments(out / MOMENTS_FILE, moments, fingerprint)  # last, because it marks a complete folder
    return calibration


def execute_calibration_of_groups(
    config: RunConfig, out: Path, progress: Progress, *, group_by: str | None = None
) -> Calibration:
    """Write ``out/basis``, and ``out/adapter`` with zero cores; no moments file, because each group has its own.

    Args:
        config: Each group gives ``calibration_size`` of its training rows.
        group_by: The column of the data whose values are the groups; None if the data name tenants, which are then the
            groups.

    Raises:
        ConfigError: There is only one group, a calibration task, or a method without bases for groups.
        DataError: A group has a single row, or a row has no value in the column.
        ArtifactError: ``out`` already holds an adapter.
    """
    if not config.moments_needed:
        raise ConfigError(f"The method {config.method!r} reads no calibration data. Use fcca or rawgrad.")
    if config.calibration_task is not None:
        raise ConfigError("Each group is calibrated on its own rows: leave --calibration-task out.")
    require_new(out, RECORD, ADAPTER)
    if group_by is None:
        files = find_tenants(Path(config.learns))
        _require_two(files, config.learns, "Give its file as --data.")
        prepared, groups = _rows_of_tenants(files, config, progress)
    else:
        prepared, groups = _rows_by(group_by, config, progress)
    model = config.method_entry.add(prepared.model, config.adapter_options(resolve_targets(config, prepared.model)))
    calibration = calibrate(model, groups=groups, options=config.calibration_options, progress=progress)
    _write(config, model, out, _rows_of(groups, calibration))
    return calibration


def execute_growth(config: RunConfig, out: Path, progress: Progress, *, by: int, of_tenants: bool) -> Calibration:
    """Widen the configured basis and write ``out/basis`` and ``out/adapter`` as :func:`execute_calibration_of_groups`.

    Args:
        config: Its data name the new tenants, or hold the rows of one.
        by: The number of new directions on each side.
        of_tenants: Whether the data name tenants.

    Raises:
        ConfigError: It asks for another method or rank than the basis has, or the basis cannot be widened so.
        DataError: A tenant has a single row.
        ArtifactError: There is no such basis, it belongs to another model, or ``out`` already holds an adapter.
    """
    require_new(out, RECORD, ADAPTER)
    config = on_named_basis(config)
    if of_tenants:
        prepared, groups = _rows_of_tenants(find_tenants(Path(config.learns)), config, progress)
    else:
        prepared = prepare(config, progress)
        groups = _groups(prepared.rows.groups or {"rows": prepared.rows.calibration}, prepared)
    model = config.method_entry.add(prepared.model, config.adapter_options(()))
    before = read_header(str(config.basis))["calibrated_on"]
    calibration = grow_basis(model, groups, by=by, options=config.calibration_options, progress=progress)
    _write(config, model, out, f"{before or 'unknown rows'}; {by} more for {_rows_of(groups, calibration)}")
    return calibration


def _write(config: RunConfig, model: PeftModel, out: Path, rows: str | None) -> None:
    """Write the adapter and its basis, which names the rows that it was calibrated on."""
    out.mkdir(parents=True, exist_ok=True)
    config.method_entry.save(model, out / ADAPTER, out)
    save_basis(model, out / BASIS, calibrated_on=rows)


def _rows_of_tenants(
    files: Mapping[str, Path], config: RunConfig, progress: Progress
) -> tuple[PreparedRun, dict[str, list[Batch]]]:
    """The calibration batches of each tenant."""
    prepared, tenants = read_each(config, files, progress)
    return prepared, _groups({name: one.rows.calibration for name, one in tenants.items()}, prepared)


def _rows_by(column: str, config: RunConfig, progress: Progress) -> tuple[PreparedRun, dict[str, list[Batch]]]:
    """The calibration batches of the rows with each value of a column, by value in the order of their first row."""
    if not isinstance(config.data, str) or config.data == STANDARD_INPUT or config.packing:
        came = "--packing" if config.packing else f"--task {config.task}" if config.data is None else config.learns
        raise ConfigError(f"--group-by {column} is for a file of rows, given once as --data, but {came} came.")
    value_of = {}
    for number, row in enumerate(read_source(config.data), start=1):
        if row.get(column) in (None, ""):
            known = ", ".join(map(str, row))
            raise DataError(
                f"--group-by needs a value in the column {column!r} of every row, but row {number} of {config.data} "
                f"has none. Its columns are: {one_line(known, 120)}."
            )
        value_of[f"row-{number}"] = one_line(row[column])
    _require_two(value_of.values(), f"the column {column!r} of {config.data}", "Leave --group-by out.")
    prepared = prepare(config, progress)
    groups: dict[str, list[TokenRow]] = {value: [] for value in value_of.values()}
    for drawn in sorted(prepared.rows.train, key=lambda row: draw_rank(row, config.seed + 1)):
        groups[value_of[drawn.id]].append(drawn)
    return prepared, _groups({value: rows[: config.calibration_size] for value, rows in groups.items()}, prepared)


def _require_two(names: Iterable[str], where: str, way_out: str) -> None:
    if len(different := set(names)) < 2:
        raise ConfigError(
            f"A basis for groups is chosen for two at least, but {where} holds only {different.pop()!r}. {way_out}"
        )


def _groups(rows: Mapping[str, Sequence[TokenRow]], prepared: PreparedRun) -> dict[str, list[Batch]]:
    """The batches of each group's calibration rows; a group with a single row is refused."""
    for name, own in rows.items():
        if len(own) < FEWEST_ROWS:
            raise DataError(
                f"Each group is calibrated on {FEWEST_ROWS} rows at least, but {name!r} has {len(own)} beside those "
                "held out. Give it more rows or a larger --calibration-size."
            )
    return {name: calibration_batches(own, prepared.encoder.pad_id) for name, own in rows.items()}


def _rows_of(groups: Mapping[str, Sequence[Batch]], calibration: Calibration) -> str:
    """Describe the calibration data for the basis and the model cards."""
    sizes = {sum(len(batch["input_ids"]) for batch in batches) for batches in groups.values()}
    rows = f"{min(sizes)} rows each" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)} rows"
    num_tokens = next(iter(calibration.layers.values())).num_tokens
    return f"{num_of(len(groups), 'group')} of {rows}, {num_tokens:,} tokens"
