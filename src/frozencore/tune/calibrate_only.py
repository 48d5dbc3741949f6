"""Calibrate without training: bases for later runs, also one of the rows of many tenants."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from frozencore.adapter.bases import save_basis
from frozencore.adapter.calibrate import Calibration, calibrate
from frozencore.adapter.layer import frozen_core_layers
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.moments_file import MomentsFingerprint, save_moments
from frozencore.errors import ConfigError
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.text import Progress
from frozencore.tune.adapt import calibration_batches
from frozencore.tune.calibration_record import CalibrationSummary
from frozencore.tune.config import RunConfig
from frozencore.tune.folder import ADAPTER, BASIS, MOMENTS_FILE, RECORD, require_new
from frozencore.tune.load import prepare, resolve_targets
from frozencore.tune.locate import find_tenants
from frozencore.tune.make_record import calibrated_on
from frozencore.tune.many.tenant_rows import read_tenants


def execute_calibration(config: RunConfig, out: Path, progress: Progress, *, of_tenants: bool = False) -> Calibration:
    """Write ``out/moments.safetensors``, ``out/adapter`` with zero cores, and ``out/basis`` for many adapters.

    Args:
        of_tenants: The data name tenants. The calibration rows are ``calibration_size`` rows in all, spread over them.

    Raises:
        ConfigError: The method reads no data, or calibration rows were named beside tenants.
        DataError: There are no tenants, or the file of one has bad rows.
        ArtifactError: ``out`` holds a finished run, an adapter, a basis or a calibration already.
        TrainingError: ``out`` holds an interrupted run.
    """
    if not config.method.moments_needed:
        raise ConfigError(
            f"The method {config.method.name!r} reads no calibration data: `frozencore tune` is all it needs."
        )
    if of_tenants and config.rows.calibration_data is not None:
        raise ConfigError("--tenants calibrates on rows of each tenant: leave --calibration-data out.")
    require_new(out, RECORD, MOMENTS_FILE, ADAPTER, BASIS)
    if of_tenants:
        inputs, _ = read_tenants(config, find_tenants(Path(config.rows.learns)), progress)
    else:
        inputs = prepare(config.model, config.rows, config.scoring, progress)
    targets = resolve_targets(config.method, inputs.model)
    batches = calibration_batches(inputs.rows.calibration, inputs.encoder.pad_id)
    fingerprint = MomentsFingerprint.of(inputs.model, batches, config.method.calibration)
    model = config.method.entry.add(inputs.model, config.method.adapter_options(targets))
    needs = config.method.moments_needed | CAPTURE_NEEDS  # inspect reads G, a and d
    started = time.perf_counter()
    layers = {name: layer.get_base_layer() for name, layer in frozen_core_layers(model, "default").items()}
    moments = collect_moments(
        model.get_base_model(), batches, layers, needs=needs, options=config.method.calibration, progress=progress
    )
    collect_s = time.perf_counter() - started
    calibration = calibrate(model, batches, moments=moments, options=config.method.calibration, progress=progress)
    calibration = replace(calibration, collect_s=calibration.collect_s + collect_s)
    out.mkdir(parents=True, exist_ok=True)
    config.method.entry.save(model, out / ADAPTER, out)
    read = calibrated_on(config.method, config.rows, inputs.rows, CalibrationSummary.of(calibration))
    save_basis(model, out / BASIS, calibrated_on=read)
    save_moments(out / MOMENTS_FILE, moments, fingerprint)  # last, because it marks a complete folder
    return calibration
