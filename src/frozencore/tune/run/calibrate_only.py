"""Calibrate without training: bases for later runs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from frozencore.adapter.bases.access import save_basis
from frozencore.adapter.bases.calibrate import Calibration, calibrate
from frozencore.adapter.bases.rank_budget import GivenMoments
from frozencore.calibration.batches import in_halves
from frozencore.calibration.moments_file import MomentsFingerprint, save_moments
from frozencore.errors import ConfigError
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.tune.run.basis_fit import collect_for
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.make_record import calibrated_on
from frozencore.tune.run.models import resolve_targets
from frozencore.tune.run.prepare import calibration_batches, prepare
from frozencore.tune.run.run_folder import ADAPTER, BASIS, MOMENTS_FILE, RECORD, require_new
from frozencore.words import Progress


def execute_calibration(config: RunConfig, out: Path, progress: Progress) -> Calibration:
    """Write ``out/moments.safetensors``, ``out/adapter`` with zero cores, and ``out/basis`` for many adapters.

    With a memory budget no moments file is written, because the budget avoids holding the sums of all layers.

    Raises:
        ConfigError: The method reads no data.
        ArtifactError: ``out`` holds a finished run or a calibration already.
    """
    if not config.moments_needed:
        raise ConfigError(f"The method {config.method!r} reads no calibration data: `frozencore tune` is all it needs.")
    require_new(out, RECORD, MOMENTS_FILE if config.memory_budget is None else ADAPTER)
    prepared = prepare(config, progress)
    targets = resolve_targets(config, prepared.model)
    batches = calibration_batches(prepared.rows, prepared.encoder.pad_id)
    fingerprint = MomentsFingerprint.of(prepared.model, batches, config.calibration_options)
    model = config.method_entry.add(prepared.model, config.adapter_options(targets))
    needs = config.moments_needed | CAPTURE_NEEDS  # inspect reads G, a and d
    started = time.perf_counter()
    parts = None
    if config.memory_budget is None:
        sets = [batches] if config.rank_budget is None else in_halves(batches)
        parts = [collect_for(config, model, some, needs, progress) for some in sets]
    collect_s = time.perf_counter() - started
    calibration = calibrate(model, batches, options=config.calibration_options, moments=parts, progress=progress)
    calibration = replace(calibration, collect_s=calibration.collect_s + collect_s)
    out.mkdir(parents=True, exist_ok=True)
    config.method_entry.save(model, out / ADAPTER, out)
    save_basis(model, out / BASIS, calibrated_on=calibrated_on(config, prepared, calibration))
    if parts is not None:
        # last, because it marks a complete folder
        save_moments(out / MOMENTS_FILE, GivenMoments(parts).taken(), fingerprint)
    return calibration
