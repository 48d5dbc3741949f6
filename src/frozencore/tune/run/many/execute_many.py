"""``tune-many``: train a core for each tenant on its own rows, together on one basis, and save and record each."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from warnings import WarningMessage

from peft import PeftModel
from torch import nn

from frozencore.adapter.bases import basis_fingerprint, save_basis, set_bases
from frozencore.adapter.calibrate import Calibration
from frozencore.adapter.saved.basis import load_basis
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.fingerprint import fingerprint_model
from frozencore.ranks import each_by_itself, first_before_others, from_first, gathered, own_rank
from frozencore.tune.config import RunConfig
from frozencore.tune.run.adapt import adapt_from_data, adapter_of
from frozencore.tune.run.costs import PeakMemory
from frozencore.tune.run.make_record import calibrated_on
from frozencore.tune.run.many.finish import Finisher, TenantOutcome
from frozencore.tune.run.many.tenant_rows import (
    ShareFolders,
    TenantRows,
    own_tenants,
    read_tenants,
    tenants_of,
    told_of,
)
from frozencore.tune.run.models import resolve_targets
from frozencore.tune.run.prepare import PreparedRun
from frozencore.tune.run.run_cache import RunCache
from frozencore.tune.run.run_folder import BASE_SCORE, BASIS, CACHE, CHECKPOINTS, refuse_finished
from frozencore.tune.run.training_port import Training, recipe_of
from frozencore.tune.training.checkpoints import newest_complete
from frozencore.tune.training.many.losses import held_out_losses
from frozencore.tune.training.many.tenant import Tenant, Validation
from frozencore.tune.training.many.train import SLOTS, train_many
from frozencore.words import Progress, as_stage


def execute_many(
    config: RunConfig,
    out: Path,
    progress: Progress,
    *,
    num_slots: int = SLOTS,
    resume: bool = False,
) -> dict[str, TenantOutcome]:
    """Train every tenant of ``config.rows.data``, and write a folder ``out/NAME`` for each when it ends.

    The basis is the configured one, or ``out/basis``, calibrated on rows of all tenants. Several processes share the
    tenants among them; the first computes the basis and the others read it.

    Args:
        config: Its ``data`` name the tenants' files (:func:`find_tenants`); the other options hold for all tenants.
        num_slots: Tenants that train at once in a process.
        resume: Continue from the newest complete checkpoint in ``out``.

    Returns:
        The outcome of each tenant, in order.

    Raises:
        FrozenCoreError: A file has bad input (raised before anything is written), or the folder has finished runs.
    """
    started, folders = time.perf_counter(), ShareFolders(out)
    config, prepared, every = each_by_itself(partial(_read, config, out, folders, progress, resume=resume))
    targets, model_hash = resolve_targets(config.method, prepared.model), fingerprint_model(prepared.model)
    own, cache = own_tenants(every), RunCache(out, reads_only=own_rank() > 0)
    before = _score_base(every, own, cache, prepared, model_hash, progress)
    memory = PeakMemory(prepared.model)
    caught: list[WarningMessage] = []

    def adapt() -> tuple[PeftModel, Calibration | None, float]:
        with warnings.catch_warnings(record=True) as heard, cache.removed_if_refused():
            warnings.simplefilter("always")
            model, calibration, calibration_s = cache.load_or_build_adapter(
                adapter_of(config, targets, {"model": model_hash, **prepared.rows.fingerprints}),
                prepared,
                config.method.entry,
                lambda: adapt_from_data(config, prepared, targets, progress),
                heard,
            )
            _name_basis(model, out / BASIS, calibrated_on(config, prepared, calibration))
        caught.extend(heard)
        return model, calibration, calibration_s

    model, calibration, calibration_s = first_before_others(adapt)
    basis = _common_basis(model, out)
    folders.make()
    common = Training(
        config, prepared, model, targets, out, {"model": model_hash, "basis": basis}, memory, started, progress,
        calibration=calibration, calibration_s=calibration_s,
        captures=calibration.captures if calibration else {}, warned=caught,
    )  # fmt: skip
    finisher = Finisher(common, own, before, side_by_side=(len(own), min(num_slots, len(own))))
    each_by_itself(
        lambda: train_many(
            model,
            {name: tenant_of(one, model) for name, one in own.items()},
            pad_id=prepared.encoder.pad_id,
            num_slots=num_slots,
            checkpoint_dir=folders.own,
            checkpoint_steps=config.training.save_steps,
            resume=resume,
            identity={"base model": model_hash},
            on_end=finisher,
            progress=progress,
        )
    )
    outcomes = gathered(finisher.outcomes)
    if own_rank() == 0:
        for left in (CHECKPOINTS, CACHE):
            shutil.rmtree(out / left, ignore_errors=True)
    return {name: outcomes[name] for name in every}


def _read(
    config: RunConfig, out: Path, folders: ShareFolders, progress: Progress, *, resume: bool
) -> tuple[RunConfig, PreparedRun, dict[str, TenantRows]]:
    """The configuration with its basis, the prepared run of all tenants, and each tenant's rows."""
    config, files = tenants_of(config)
    refuse_finished(out, files, resume=resume)
    folders.require_as_many()
    prepared, every = read_tenants(config, files, progress)
    for name, one in every.items():
        with told_of(repr(name)):
            tenant_of(one, prepared.model)  # raises errors before anything is written
    return config, prepared, every


def _score_base(
    every: Mapping[str, TenantRows],
    own: Mapping[str, TenantRows],
    cache: RunCache,
    prepared: PreparedRun,
    model_hash: str,
    progress: Progress,
) -> dict[str, float]:
    """The base model's held-out loss on each tenant's rows; each process scores its own, the first stores all."""
    rows = {name: one.rows.fingerprints["evaluation"] for name, one in every.items()}
    of = {"base model": model_hash, "rows": rows}
    by_name: dict[str, float] | None = from_first(lambda: cache.load(BASE_SCORE, dict[str, float], of))
    if by_name is None:
        scored = each_by_itself(
            lambda: held_out_losses(
                prepared.model,
                [one.rows.held_out for one in own.values()],
                pad_id=prepared.encoder.pad_id,
                progress=as_stage(progress, "score base"),
            )
        )
        by_name = gathered(dict(zip(own, scored, strict=True)))
        cache.store(BASE_SCORE, dict[str, float], of, by_name)
    return by_name


def _common_basis(model: PeftModel, out: Path) -> str:
    """The fingerprint of the basis.

    Raises:
        ConfigError: The processes have different bases.
    """
    own = basis_fingerprint(model)
    if len(set(gathered({str(own_rank()): own}).values())) > 1:
        raise ConfigError(
            f"All processes train on one basis, which the first leaves in {out}, but others found another one. Let "
            "--output be on a disk that all of them see, or calibrate first and give --basis."
        )
    return own


def _name_basis(model: PeftModel, folder: Path, calibrated_on: str | None) -> None:
    """Save a basis without a name once for all tenants, so that their adapters are saved as cores only.

    Raises:
        ArtifactError: The folder holds another basis, of a run with other options or rows.
    """
    chosen = model.peft_config["default"]
    if chosen.basis_id is not None or chosen.initial_step:  # such cores are saved with their own bases
        return
    if folder.exists():
        made = basis_fingerprint(model)
        set_bases(model, load_basis(folder))
        begins = own_rank() == 0 and newest_complete(folder.parent / CHECKPOINTS) is None  # else it is that one's basis
        if begins and basis_fingerprint(model) != made:
            raise ArtifactError(
                f"Tenants train on the basis that their options give, but {folder} is another one, of an earlier run. "
                "Choose another --output, or name that basis with --basis."
            )
    else:
        save_basis(model, folder, calibrated_on=calibrated_on)


def tenant_of(own: TenantRows, model: nn.Module) -> Tenant:
    """Make the training of a tenant."""
    rows, every, validation = own.rows.validation, own.config.scoring.select_checkpoint, None
    if rows is not None and every != "none":
        validation = Validation(rows.tokens, every, own.config.scoring.patience)
    return Tenant(own.rows.train, recipe_of(own.config, own.rows, model), validation)
