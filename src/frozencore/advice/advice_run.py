"""Advise on the bases, ranks and targets of a run before it is made, from its calibration rows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from frozencore.advice.advise import Advice, advise
from frozencore.advice.settings import Setting
from frozencore.advice.trials import Worth
from frozencore.constructors import BasisOptions, constructor_options
from frozencore.errors import ConfigError
from frozencore.files.whole_file import write_json
from frozencore.tune.run.config import RunConfig, make_config
from frozencore.tune.run.models import resolve_targets
from frozencore.tune.run.prepare import PreparedRun, calibration_batches, prepare
from frozencore.tune.run.provenance import provenance
from frozencore.tune.run.run_folder import ADVICE, require_new
from frozencore.words import Progress, flag_of


def advise_run(config: RunConfig, prepared: PreparedRun, progress: Progress) -> Advice:
    """Advise from the run's calibration rows; its method and basis options are ignored.

    Raises:
        ConfigError: The rows come in groups.
    """
    if config.has_groups:
        raise ConfigError("The advice is about one set of rows, but --calibration-task names several. Give one.")
    targets = resolve_targets(config, prepared.model)
    return advise(
        prepared.model,
        calibration_batches(prepared.rows.calibration, prepared.encoder.pad_id),
        target_modules=targets if isinstance(targets, str) else list(targets),
        r=config.rank if config.rank_budget is None else None,
        rank_budget=config.rank_budget,
        seed=config.seed,
        options=config.calibration_options,
        progress=progress,
    )


def execute_advice(config: RunConfig, out: Path | None, progress: Progress) -> Advice:
    """Advise, and write ``out/advice.json``.

    Raises:
        ArtifactError: ``out`` holds advice already.
    """
    if out is not None:
        require_new(out, ADVICE)
    prepared = prepare(config, progress)
    advice = advise_run(config, prepared, progress)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / ADVICE, advice_record(config, prepared, advice))
    return advice


def refuse_advised(config: RunConfig) -> None:
    """Refuse options that the advice chooses.

    Raises:
        ConfigError: Such an option was given; the message names the first one.
    """
    chosen = {*config.core.model_dump(exclude_defaults=True)} & constructor_options().keys()
    for name in [*config.given(["method", "basis", "private_epsilon", "loss"]), *sorted(chosen)]:
        raise ConfigError(f"--advised chooses the bases by the rows of the run: leave {flag_of(name)} out.")


def with_advice(config: RunConfig, setting: Setting) -> RunConfig:
    """The configuration with the bases, layers and ranks of a setting."""
    values = config.model_dump()
    values["core"] |= setting.options
    values |= {
        "method": setting.method,
        "targets": "all-linear" if setting.on == "all-linear" else config.targets,
        "rank": BasisOptions.rank if setting.rank is None else setting.rank,
        "rank_budget": setting.rank_budget,
    }
    return make_config(**values)


def advice_record(config: RunConfig, prepared: PreparedRun, advice: Advice) -> dict[str, Any]:
    """The advice and its inputs as JSON values."""
    asked = {"model": config.model, "task": config.task, "data": None if config.data is None else config.learns}
    return {
        "format": 1,
        "asked": {**asked, "targets": config.targets, "rank": config.rank, "rank_budget": config.rank_budget},
        "recommended": {**_worth_json(advice.recommended), "flags": flags_of(config, advice.recommended.setting)},
        **{
            name: value
            for name, value in asdict(advice).items()
            if name not in ("bases", "kept", "shapes")
        },
        "bases": [_worth_json(worth) for worth in advice.bases],
        "shapes": [_worth_json(worth) for worth in advice.shapes],
        "hashes": prepared.rows.fingerprints,
        "provenance": provenance(),
    }  # fmt: skip


def flags_of(config: RunConfig, setting: Setting) -> str:
    """The flags with which ``frozencore tune`` trains a setting, without model and rows."""
    targets = "all-linear" if setting.on == "all-linear" else config.targets
    words = {"method": setting.method, **setting.options, "targets": targets}
    words |= {"rank": setting.rank, "rank_budget": setting.rank_budget}
    return " ".join(
        f"{flag_of(name)} {value if isinstance(value, str | int | float) else ','.join(value)}"
        for name, value in words.items()
        if value is not None
    )


def _worth_json(worth: Worth) -> dict[str, Any]:
    return {**asdict(worth.setting), "gain": worth.gain, "num_values": worth.num_values, "ranks": dict(worth.ranks)}
