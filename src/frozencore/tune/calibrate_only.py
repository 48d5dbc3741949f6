"""Calibrate without training: bases for later runs, also one of the rows of many tenants."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from frozencore.adapter.calibrate import calibrate
from frozencore.adapter.loaded_basis import save_basis
from frozencore.calibration.calibrate import Calibration
from frozencore.distributed import broadcast_from_rank0, raise_on_any_rank
from frozencore.errors import ConfigError
from frozencore.files.atomic_write import remove_left, require_writable
from frozencore.files.names import ADAPTER, BASIS
from frozencore.progress import Progress
from frozencore.tune.adapt import own_share
from frozencore.tune.adapters import add_adapter, save_adapter
from frozencore.tune.calibration_record import CalibrationSummary
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import RECORD, locked, require_new
from frozencore.tune.load import prepare, resolve_targets
from frozencore.tune.locate import find_tenants
from frozencore.tune.make_record import calibrated_on
from frozencore.tune.many.tenant_rows import read_tenants
from frozencore.tune.processes import is_first


def execute_calibration(config: RunConfig, out: Path, progress: Progress, *, of_tenants: bool = False) -> Calibration:
    """Calibrate, and write ``out/adapter`` with zero cores and ``out/basis`` for many adapters.

    Of several processes each calibrates on its share of the rows, and the first one writes.

    Args:
        of_tenants: The data name tenants. The calibration rows are ``calibration_size`` rows in all, spread over them.

    Raises:
        ConfigError: The method reads no data, or calibration rows were named beside tenants.
        DataError: There are no tenants, or the file of one has bad rows.
        ArtifactError: ``out`` holds a finished run, an adapter or a basis already.
        TrainingError: ``out`` holds an interrupted run, or another process writes there.
    """
    if not config.method.moments_needed:
        raise ConfigError(
            f"The method {config.method.name!r} reads no calibration data: `frozencore tune` is all it needs."
        )
    if of_tenants and config.rows.calibration_data is not None:
        raise ConfigError("--tenants calibrates on rows of each tenant: leave --calibration-data out.")
    with ExitStack() as held:
        with raise_on_any_rank():
            require_writable(out)
            if is_first():
                held.enter_context(locked(out))
                for name in (ADAPTER, BASIS):
                    remove_left(out, name)  # by a killed calibration
            require_new(out, RECORD, ADAPTER, BASIS)
            if of_tenants:
                inputs, _ = read_tenants(config, find_tenants(Path(config.rows.learns)), progress)
            else:
                inputs = prepare(config.model, config.rows, config.scoring, progress)
            batches = own_share(inputs.calibration_batches())
        targets = resolve_targets(config.method, inputs.model)
        model = add_adapter(config.method.entry, inputs.model, replace(config.method, target_modules=targets))
        calibration = calibrate(model, batches, options=config.method.calibration, progress=progress)

        def save() -> None:
            read = calibrated_on(config, inputs.rows, CalibrationSummary.of(calibration))
            try:
                save_adapter(config.method.entry, model, out / ADAPTER, out)
                save_basis(model, out / BASIS, calibrated_on=read)
            except BaseException:  # one of the two alone would be in the way of the same command
                for name in (ADAPTER, BASIS):
                    shutil.rmtree(out / name, ignore_errors=True)
                raise

        broadcast_from_rank0(save)
    return calibration
