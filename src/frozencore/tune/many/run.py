"""``tune-many``: train a core for each tenant on its own rows, together on one basis, and save and record each."""

from __future__ import annotations

import math
import shutil
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from warnings import WarningMessage

from peft import PeftModel
from torch import Tensor, nn

from frozencore.adapter.bank import swap_core
from frozencore.adapter.bases import basis_fingerprint, save_basis, set_bases
from frozencore.adapter.saved.basis import load_basis
from frozencore.adapter.saved.card import write_model_card
from frozencore.distributed import each_by_itself, first_before_others, from_first, gathered, own_rank
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.fingerprint import fingerprint_model
from frozencore.files.whole_file import write_json
from frozencore.text import Progress, as_stage
from frozencore.tune.adapt import Adapted, adapter_identity
from frozencore.tune.cache import RunCache
from frozencore.tune.config import RunConfig
from frozencore.tune.cost import PeakMemory
from frozencore.tune.folder import (
    ADAPTER,
    BASE_SCORE,
    BASIS,
    CACHE,
    CHECKPOINTS,
    FAILURE,
    LAST_GOOD,
    RECORD,
    START,
    locked,
    refuse_finished,
)
from frozencore.tune.load import Inputs, resolve_targets
from frozencore.tune.make_record import AdaptedRun, FinishedRun, calibrated_on, headline, make_record
from frozencore.tune.many.slots import CoreStack, held_out_losses
from frozencore.tune.many.tenant import Tenant, Trained, Validation
from frozencore.tune.many.tenant_rows import (
    ShareFolders,
    TenantRows,
    naming_tenant,
    own_tenants,
    read_tenants,
    tenants_of,
)
from frozencore.tune.many.train import SLOTS, train_many
from frozencore.tune.record import Failure, Provenance, TunedRecord, read_record
from frozencore.tune.run import recipe_of
from frozencore.tune.scores import Score
from frozencore.tune.training.checkpoints import newest_complete


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
    with ExitStack() as held:
        config, inputs, every = each_by_itself(partial(_read, config, out, folders, held, progress, resume=resume))
        targets, model_hash = resolve_targets(config.method, inputs.model), fingerprint_model(inputs.model)
        own, cache = own_tenants(every), RunCache(out, reads_only=own_rank() > 0)
        before = _score_base(every, own, cache, inputs, model_hash, progress)
        memory = PeakMemory(inputs.model)
        identity = adapter_identity(config.method, targets, {"model": model_hash, **inputs.rows.fingerprints})

        def adapt_all() -> tuple[Adapted, list[WarningMessage]]:
            with warnings.catch_warnings(record=True) as warned, cache.removed_if_refused():
                warnings.simplefilter("always")
                adapted = cache.adapt(identity, config.method, inputs, targets, progress, warned)
                said = calibrated_on(config.method, config.rows, inputs.rows, adapted.calibration)
                _name_basis(adapted.model, out / BASIS, said)
            return adapted, warned

        adapted, warned = first_before_others(adapt_all)
        hashes = {"model": model_hash, "basis": _common_basis(adapted.model, out)}
        folders.make()
        common = AdaptedRun(config, inputs, out, targets, hashes, adapted, memory, warned, started)
        finisher = Finisher(common, own, before, side_by_side=(len(own), min(num_slots, len(own))))
        each_by_itself(
            lambda: train_many(
                adapted.model,
                {name: tenant_of(one, adapted.model) for name, one in own.items()},
                pad_id=inputs.encoder.pad_id,
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
    config: RunConfig, out: Path, folders: ShareFolders, held: ExitStack, progress: Progress, *, resume: bool
) -> tuple[RunConfig, Inputs, dict[str, TenantRows]]:
    """The configuration with its basis, the model with the rows of the basis, and each tenant's rows.

    The first process holds the run's folder until ``held`` ends.
    """
    config, files = tenants_of(config)
    refuse_finished(out, files, resume=resume)
    if folders.is_first:
        held.enter_context(locked(out))
    folders.require_as_many()
    inputs, every = read_tenants(config, files, progress)
    for name, one in every.items():
        with naming_tenant(repr(name)):
            tenant_of(one, inputs.model)  # raises errors before anything is written
    return config, inputs, every


def _score_base(
    every: Mapping[str, TenantRows],
    own: Mapping[str, TenantRows],
    cache: RunCache,
    inputs: Inputs,
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
                inputs.model,
                [one.rows.held_out for one in own.values()],
                pad_id=inputs.encoder.pad_id,
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
            "--out be on a disk that all of them see, or calibrate first and give --basis."
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
                "Choose another --out, or name that basis with --basis."
            )
    else:
        save_basis(model, folder, calibrated_on=calibrated_on)


def tenant_of(own: TenantRows, model: nn.Module) -> Tenant:
    """Make the training of a tenant."""
    rows, every, validation = own.rows.validation, own.config.scoring.select_checkpoint, None
    if rows is not None and every != "none":
        validation = Validation(rows.tokens, every, own.config.scoring.patience)
    return Tenant(own.rows.train, recipe_of(own.config.training, own.config.method.entry, own.rows, model), validation)


TenantOutcome = TunedRecord | Failure
"""The content of a tenant's ``result.json`` or ``failure.json``."""


@dataclass(frozen=True)
class Finisher:
    """Score, save and record tenants when they end; existing results stay unchanged.

    Attributes:
        common: What all tenants share: its rows are the calibration rows of the basis, its hashes those of the base
            model and the basis. The core of its model is replaced by each saved tenant's in turn.
        before: Held-out loss of the base model on each tenant's rows.
        side_by_side: The number of tenants, and how many train at once.
    """

    common: AdaptedRun
    own: Mapping[str, TenantRows]
    before: Mapping[str, float]
    side_by_side: tuple[int, int]
    outcomes: dict[str, TenantOutcome] = field(default_factory=dict)

    def __call__(self, ended: Mapping[str, Trained]) -> None:
        losses = self._held_out({name: one.cores for name, one in ended.items() if one.diverged is None})
        for name, trained in ended.items():
            folder = self.common.folder / name
            if (folder / RECORD).exists():  # written before the run was killed
                record = read_record((folder / RECORD).read_text())
                assert isinstance(record, TunedRecord)
                self.outcomes[name] = record
            elif trained.diverged is not None:
                self.outcomes[name] = self._fail(name, trained, trained.diverged)
            elif not math.isfinite(losses[name]):
                self.outcomes[name] = self._fail(name, trained, "Training diverged: the held-out loss is not finite.")
            else:
                self.outcomes[name] = self._record(name, trained, losses[name])

    def _held_out(self, cores: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
        if not cores:
            return {}
        model, pad_id = self.common.adapted.model, self.common.inputs.encoder.pad_id
        stack = CoreStack(model, len(cores))
        for slot, of_tenant in enumerate(cores.values()):
            stack.put(slot, of_tenant)
        sets = [self.own[name].rows.held_out for name in cores]
        losses = held_out_losses(model, sets, pad_id=pad_id, through=stack.rows)
        return dict(zip(cores, losses, strict=True))

    def _record(self, name: str, trained: Trained, loss: float) -> TunedRecord:
        common, own, folder = self.common, self.own[name], self.common.folder / name
        self._save(own.config, trained, folder / ADAPTER)
        calibrated = common.inputs.rows.fingerprints["calibration"]  # rows of every tenant
        here = replace(
            common,
            config=own.config,
            inputs=replace(common.inputs, rows=own.rows),
            folder=folder,
            hashes={**own.rows.fingerprints, "calibration": calibrated, **common.hashes},
        )
        run = FinishedRun(
            **vars(here),
            recipe=recipe_of(own.config.training, own.config.method.entry, own.rows, common.adapted.model),
            report=replace(trained.report, side_by_side=self.side_by_side),
            before=Score(self.before[name]),
            after=Score(loss),
        )
        record = make_record(run)
        calibration = calibrated_on(
            common.config.method, common.config.rows, common.inputs.rows, common.adapted.calibration
        )
        write_model_card(folder / ADAPTER, calibration=calibration, scores=headline(run.after))
        write_json(folder / RECORD, record.content())
        (folder / FAILURE).unlink(missing_ok=True)  # of an earlier run into this folder
        shutil.rmtree(folder / LAST_GOOD, ignore_errors=True)
        return record

    def _fail(self, name: str, trained: Trained, why: str) -> Failure:
        folder, config = self.common.folder / name, self.own[name].config
        self._save(config, trained, folder / LAST_GOOD)
        failure = Failure(
            reason="diverged",
            message=f"{why} The last good core is in {folder / LAST_GOOD}.",
            config=config.content(),
            provenance=Provenance.here(next(self.common.adapted.model.parameters()).device),
        )
        write_json(folder / FAILURE, failure.content())
        return failure

    def _save(self, config: RunConfig, trained: Trained, folder: Path) -> None:
        swap_core(self.common.adapted.model, trained.cores)
        config.method.entry.save(self.common.adapted.model, folder, folder.parent / START)
