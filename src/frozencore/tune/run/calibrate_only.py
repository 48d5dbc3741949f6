"""Calibrate without training: bases for later runs, and the fit of a saved basis to other rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from peft import PeftModel

from frozencore.adapter.bases.access import save_basis
from frozencore.adapter.bases.calibrate import Calibration, calibrate
from frozencore.adapter.bases.rank_budget import GivenMoments
from frozencore.adapter.layer import frozen_core_layers
from frozencore.calibration.batches import Batch, in_halves
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.moments_file import MomentsFingerprint, save_moments
from frozencore.errors import ArtifactError, CalibrationError, ConfigError
from frozencore.files.whole_file import require_writable
from frozencore.maths.basis import known_basis
from frozencore.maths.capture import CAPTURE_NEEDS, share_held
from frozencore.maths.groups import Share, mean_share
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.tune.run.adapt import on_named_basis
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.make_record import calibrated_on
from frozencore.tune.run.models import resolve_targets
from frozencore.tune.run.prepare import calibration_batches, prepare
from frozencore.tune.run.run_folder import ADAPTER, BASIS, MOMENTS_FILE
from frozencore.words import Progress


def collect_for(
    config: RunConfig, model: PeftModel, batches: list[Batch], needs: frozenset[MomentName], progress: Progress
) -> dict[str, LayerMoments]:
    """Collect moments of the adapted layers; the adapter is still zero."""
    layers = {name: layer.get_base_layer() for name, layer in frozen_core_layers(model, "default").items()}
    return collect_moments(
        model.get_base_model(),
        batches,
        layers,
        needs=needs,
        options=config.calibration_options,
        progress=progress,
    )


def execute_calibration(config: RunConfig, out: Path, progress: Progress) -> Calibration:
    """Write ``out/moments.safetensors``, ``out/adapter`` with zero cores, and ``out/basis`` for many adapters.

    With a memory budget no moments file is written, because the budget avoids holding the sums of all layers.

    Raises:
        ConfigError: The method reads no data.
        ArtifactError: ``out`` holds moments or an adapter already.
    """
    if not config.moments_needed:
        raise ConfigError(f"The method {config.method!r} reads no calibration data: `frozencore tune` is all it needs.")
    if (out / MOMENTS_FILE).exists() or (config.memory_budget is not None and (out / ADAPTER).exists()):
        raise ArtifactError(f"{out} already holds a calibration. Choose another --output, or remove that folder.")
    require_writable(out)
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


@dataclass(frozen=True)
class RowShares:
    """The share of the rows' whitened moment that a basis holds, in each layer that their gradient reaches."""

    num_rows: int
    layers: dict[str, Share]

    @property
    def mean(self) -> Share:
        return mean_share(self.layers.values())


def shares_of_rows(config: RunConfig, progress: Progress) -> RowShares:
    """Collect the moments of the configured rows, once, and compare the configured basis with them.

    The rows are the calibration rows of a run with this configuration.

    Raises:
        ArtifactError: There is no such basis, or it belongs to another model.
        CalibrationError: The rows have no gradient in any layer of the basis.
    """
    config = on_named_basis(config)
    prepared = prepare(config, progress)
    model = config.method_entry.add(prepared.model, config.adapter_options(()))
    batches = calibration_batches(prepared.rows, prepared.encoder.pad_id)
    moments = collect_for(config, model, batches, CAPTURE_NEEDS, progress)
    shares = {}
    for name, layer in frozen_core_layers(model, "default").items():
        found = moments.pop(name)
        if bool(found.G.any()):
            P, Q, _ = layer.factors("default")
            shares[name] = share_held(found, known_basis(P.float(), Q.float()))
    if not shares:
        raise CalibrationError(
            "A basis holds a share of a gradient, but these rows have none. Check their completions."
        )
    return RowShares(len(prepared.rows.calibration), shares)
