"""Make the adapter of a run: on a saved basis, or with bases computed from its calibration rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from pydantic_core import to_jsonable_python

from frozencore.adapter.calibrate import Calibration, calibrate
from frozencore.adapter.saved.basis import read_header
from frozencore.calibration.batches import Batch
from frozencore.calibration.calibration_options import options_of_sums
from frozencore.calibration.moments_file import MomentsFingerprint, load_moments
from frozencore.errors import ConfigError
from frozencore.options import without_lists
from frozencore.ranks import num_ranks, own_rank
from frozencore.tune.config import RunConfig, make_config, run_options
from frozencore.tune.methods import Targets
from frozencore.tune.run.prepare import CALIBRATION_BATCH, PreparedRun, calibration_batches
from frozencore.words import Progress, flag_of

OLD_DEFAULT = {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj"}  # of bases that were saved before names were found
DECIDED = {"method": "constructor", "rank": "r", "targets": "target_modules"}


def on_named_basis(config: RunConfig) -> RunConfig:
    """Fill a configuration with the method, rank, targets and options of its saved basis, if it names one.

    Raises:
        ConfigError: The configuration has another method, rank or option than the basis.
        ArtifactError: There is no such basis, or it is damaged.
    """
    if config.method.basis is None:
        return config
    options = read_header(config.method.basis)["options"]
    asked = config.values()
    core = {name: options.get(name, value) for name, value in config.method.core.items()}
    decided = {own: options.get(theirs) for own, theirs in DECIDED.items()}
    if isinstance(decided["targets"], str) and decided["targets"] != "all-linear":
        decided["targets"] = None  # may be a regular expression, which only the basis can name
    elif set(decided["targets"] or ()) == OLD_DEFAULT:
        decided["targets"] = None  # the default in Python, which names projections that this model may not have
    for name, value in {**decided, **core}.items():
        if asked[name] not in (run_options()[name].default, value, without_lists(value)):
            raise ConfigError(
                f"The basis in {config.method.basis} has {name.replace('_', '-')} {value}, but {asked[name]} came. "
                f"Leave {flag_of(name)} out."
            )
    return make_config(**{**asked, **decided, **core})


Adapted = tuple[PeftModel, Calibration | None]
Adapt = Callable[[RunConfig, PreparedRun, Targets, Progress], Adapted]
"""Add the configured adapter to a loaded model and calibrate it; the calibration is None if no data were read."""


def adapt_from_data(
    config: RunConfig, prepared: PreparedRun, targets: Targets, progress: Progress, moments_file: Path | None = None
) -> Adapted:
    """Add the adapter, with bases computed from the run's calibration rows.

    Args:
        moments_file: Moments of ``frozencore calibrate`` in place of a new pass; they must match the run.
    """
    model = config.method.entry.add(prepared.model, config.method.adapter_options(targets))
    if not config.method.moments_needed:
        if moments_file:
            what = (
                f"the method {config.method.name!r}, which reads no data"
                if config.method.basis is None
                else "a saved basis"
            )
            raise ConfigError(f"--moments is of no use to {what}: leave it out.")
        return model, None
    batches = calibration_batches(prepared.rows.calibration, prepared.encoder.pad_id)
    fingerprint = MomentsFingerprint.of(model, batches, config.method.calibration)
    moments = load_moments(moments_file, fingerprint) if moments_file else None
    if moments is None:
        batches = own_share(batches)
    return model, calibrate(
        model,
        batches,
        options=config.method.calibration,
        moments=moments,
        progress=progress,
    )


def own_share(batches: list[Batch]) -> list[Batch]:
    """The share of the calibration batches of this process; all shares together are the batches of a single process.

    Raises:
        ConfigError: There are fewer batches than processes.
    """
    if len(batches) < num_ranks():
        raise ConfigError(
            f"Each process calibrates on a batch of {CALIBRATION_BATCH} rows at least, but there are {len(batches)} "
            f"batches for {num_ranks()} processes. Start fewer, or give a larger --calibration-size."
        )
    return batches[own_rank() :: num_ranks()]


def adapter_of(config: RunConfig, targets: Targets, hashes: Mapping[str, str]) -> dict[str, Any]:
    """The inputs that determine an adapter, as JSON values by name."""
    return {
        "base model": hashes["model"],
        "calibration rows": hashes["calibration"],
        "method": config.method.name,
        "rank": config.method.rank,
        "targets": targets if isinstance(targets, str) else list(targets),
        "memory_budget": config.method.calibration.memory_budget,
        **to_jsonable_python(config.method.core),
        **options_of_sums(vars(config.method.calibration)),
        **({} if config.method.basis is None else {"basis": read_header(config.method.basis)["identity"]}),
    }
