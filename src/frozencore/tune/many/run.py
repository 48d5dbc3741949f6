"""``tune-many``: train a core for each tenant on its own rows, together on one basis, and save and record each."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from frozencore.adapter.bank import CoreStack
from frozencore.adapter.card import write_model_card
from frozencore.adapter.core import Core
from frozencore.adapter.folders import SavedAdapter, read_adapter
from frozencore.adapter.loaded_basis import basis_id, save_basis
from frozencore.adapter.swap import swap_core
from frozencore.calibration.calibration_options import options_of_sums
from frozencore.errors import ArtifactError, FrozenCoreError
from frozencore.files.atomic_write import atomic_folder, remove_left, write_json, write_text
from frozencore.files.fingerprint import fingerprint_tensors, fingerprints_of
from frozencore.files.names import ADAPTER, BASIS, MANIFEST_FILE, RUN_FILE, UNFINISHED_FOLDER
from frozencore.progress import Progress, as_stage
from frozencore.text import one_line
from frozencore.tune.adapt import Adapted, adapt, starting_core, undone_by_rounding, with_rate
from frozencore.tune.adapters import save_adapter
from frozencore.tune.calibration_record import CalibratedAdapter
from frozencore.tune.config import RunConfig, as_flags, as_json, run_options
from frozencore.tune.cost import PeakMemory
from frozencore.tune.folder import FAILURE, RECORD, START, locked
from frozencore.tune.load import Inputs, resolve_targets
from frozencore.tune.make_record import calibrated_on, headline, make_record
from frozencore.tune.many.folder import (
    refuse_differing,
    refuse_taken,
    require_basis,
    require_unused,
    resume_key,
    standing_record,
    unfinished_file,
)
from frozencore.tune.many.slots import held_out_losses
from frozencore.tune.many.tenant import SLOTS, Tenant, Trained, Validation, train_many
from frozencore.tune.many.tenant_rows import TenantRows, naming_tenant, read_tenants, tenants_of
from frozencore.tune.many.unfinished import UnfinishedFiles
from frozencore.tune.methods import Targets
from frozencore.tune.process_group import use_own_gpu
from frozencore.tune.processes import is_first, num_started
from frozencore.tune.provenance import Provenance
from frozencore.tune.record import Failure, RecordedConfig, TenantGroup, TunedRecord
from frozencore.tune.record_part import RecordPart
from frozencore.tune.run import recipe_of
from frozencore.tune.scoring.score import Score
from frozencore.tune.training.recipe import Recipe

NOT_WRITTEN = "not written"
TenantOutcome = TunedRecord | Failure
"""The content of a tenant's ``result.json`` or ``failure.json``."""


def execute_many(
    config: RunConfig,
    out: Path,
    progress: Progress,
    *,
    num_slots: int = SLOTS,
    resume: bool = False,
) -> dict[str, TenantOutcome]:
    """Train every tenant of ``config.rows.data``, and write a folder ``out/NAME`` for each when it ends.

    The basis is the configured one, or ``out/basis``, calibrated on rows of all tenants. Of several processes each
    trains its share of the tenants on the configured basis; they exchange nothing. ``out/run.yaml`` has the options
    of the last run.

    Args:
        config: Its ``data`` name the tenants' files (:func:`find_tenants`); the other options apply to all tenants.
        num_slots: Tenants that train at once in a process.
        resume: Leave out the tenants whose record stands in ``out``; the others go on from the steps that are kept.

    Returns:
        The outcome of each tenant of this process, in order.

    Raises:
        FrozenCoreError: A file has bad input (raised before anything is written), or the folder has runs of others.
    """
    started, given = time.perf_counter(), config
    config, files = tenants_of(config)
    start = starting_core(config.method)
    use_own_gpu()
    with ExitStack() as stack:
        refuse_taken(out, files, resume=resume)
        if num_started() == 1:
            stack.enter_context(locked(out))
            for name in (*files, BASIS, MANIFEST_FILE, RUN_FILE):
                remove_left(out, escape(name))  # by a killed run
        inputs, tenant_rows = read_tenants(config, files, progress)
        tenants = {}
        for name, one in tenant_rows.items():
            with naming_tenant(repr(name)):
                tenants[name] = tenant_of(one, inputs.model)  # raises errors before anything is written
        targets, hashes = resolve_targets(config.method, inputs.model), fingerprints_of(inputs.model)
        if start is not None:
            hashes["start"] = fingerprint_tensors(start.tensors.items())
        standing = {
            name: record
            for name, one in tenant_rows.items()
            if (record := standing_record(out / name, one.config, {**hashes, **_scored(one)})) is not None
        }
        memory = PeakMemory(inputs.model)
        options = as_flags(given, many=True)
        adapted = adapt_for_all(config, inputs, targets, out, hashes, options, progress)
        hashes["basis"] = basis_id(adapted.model)
        for name, record in standing.items():
            require_basis(out / name, record, hashes["basis"])
        if is_first():
            write_text(out / RUN_FILE, options)
        to_train = {name: one for name, one in tenant_rows.items() if name not in standing}
        with adapted.model.disable_adapter():
            losses = held_out_losses(
                adapted.model,
                [one.rows.held_out for one in to_train.values()],
                pad_id=inputs.encoder.pad_id,
                progress=as_stage(progress, "score base"),
            )
        for number, name in enumerate(to_train, start=1):
            tenant, of_tenant = tenants[name], partial(_measuring, progress, number, len(to_train))
            with naming_tenant(repr(name)):
                recipe = with_rate(tenant.recipe, adapted.model, inputs.encoder.pad_id, tenant.rows, of_tenant)
            tenants[name] = replace(tenant, recipe=recipe)
        if start is not None:
            swap_core(adapted.model, start)
        finisher = Finisher(
            inputs=inputs,
            adapted=adapted,
            template=saved_template(config, inputs, adapted, Path(stack.enter_context(TemporaryDirectory()))),
            folder=out,
            hashes=hashes,
            rows_of={name: (one, tenants[name].recipe) for name, one in to_train.items()},
            before=dict(zip(to_train, losses, strict=True)),
            company=TenantGroup(tenants=len(to_train), slots=min(num_slots, len(to_train))),
            memory=memory,
            started=started,
            start=start,
        )
        keys = {
            name: {
                **resume_key(RecordedConfig.of(one.config), {**hashes, **_scored(one)}),
                "steps": tenants[name].num_steps,
            }
            for name, one in to_train.items()
        }
        between_steps = UnfinishedFiles(out, keys)
        train_many(
            adapted.model,
            {name: tenants[name] for name in to_train},
            finisher,
            pad_id=inputs.encoder.pad_id,
            num_slots=num_slots,
            progress=progress,
            begun=between_steps.read() if resume else {},
            on_stop=between_steps.write,
        )
    with suppress(OSError):  # it has tenants of another process, or does not exist
        (out / UNFINISHED_FOLDER).rmdir()
    outcomes = {**standing, **finisher.outcomes}
    return {name: outcomes[name] for name in tenant_rows}


def _scored(tenant: TenantRows) -> dict[str, str]:
    """The hashes of the rows that make a tenant's result."""
    return {name: digest for name, digest in tenant.rows.fingerprints.items() if name != "calibration"}


def tenant_of(tenant: TenantRows, model: nn.Module) -> Tenant:
    """Make the training of a tenant."""
    rows, every, validation = tenant.rows.validation, tenant.config.scoring.choose_every, None
    if rows is not None and every is not None:
        validation = Validation(rows.tokens, every, tenant.config.scoring.patience)
    recipe = recipe_of(tenant.config.training, tenant.config.method.entry, tenant.rows, model)
    return Tenant(tenant.rows.train, recipe, validation)


def saved_template(config: RunConfig, inputs: Inputs, adapted: Adapted, folder: Path) -> SavedAdapter:
    """Save the run's adapter in a folder: each tenant gets its files, except for the core and the scores in the card.

    Args:
        inputs: Their rows are those of the calibration.
    """
    save_adapter(config.method.entry, adapted.model, folder / ADAPTER, folder / START)
    source = calibrated_on(config, inputs.rows, adapted.made.calibration)
    write_model_card(folder / ADAPTER, calibration=source, scores=headline(Score(0.0)))
    return read_adapter(folder / ADAPTER)


def _measuring(progress: Progress, number: int, total: int, *_: object) -> None:
    """Report whose rate is measured, with a line for all tenants and not for each."""
    progress("rate", number, total)


@dataclass(frozen=True, kw_only=True)
class Finisher:
    """Score, save and record tenants when they end.

    Attributes:
        inputs: Their rows are those of the calibration.
        template: The run's adapter.
        folder: The folder of all tenants.
        hashes: SHA-256 of the base model, its configuration and the core that the tenants start from; the id of their
            basis.
        rows_of: The rows and the recipe of each tenant.
        before: Held-out loss of the base model on each tenant's rows.
        started: ``time.perf_counter()`` when the run began.
        start: The core that the tenants start from; None for zero.
    """

    inputs: Inputs
    adapted: Adapted
    template: SavedAdapter
    folder: Path
    hashes: Mapping[str, str]
    rows_of: Mapping[str, tuple[TenantRows, Recipe]]
    before: Mapping[str, float]
    company: TenantGroup
    memory: PeakMemory
    started: float
    start: Core | None
    outcomes: dict[str, TenantOutcome] = field(default_factory=dict)

    def __call__(self, ended: Mapping[str, Trained]) -> None:
        ended = {name: self._rounded(name, one) for name, one in ended.items()}
        losses = self._held_out({name: one.core for name, one in ended.items() if one.core is not None})
        for name, trained in ended.items():
            why = trained.diverged
            if why is None and not math.isfinite(losses[name]):
                why = "Training diverged: the held-out loss is not finite."
            outcome = self.outcomes[name] = self._finish(name, trained, losses.get(name, math.nan), why)
            is_lost = isinstance(outcome, Failure) and outcome.reason == NOT_WRITTEN
            if not is_lost or (self.folder / name / RECORD).exists():  # else --resume goes on from its steps
                unfinished_file(self.folder, name).unlink(missing_ok=True)

    def _rounded(self, name: str, trained: Trained) -> Trained:
        if trained.core is None:
            return trained
        bits = self.rows_of[name][0].config.method.saved_bits
        core = trained.core.in_bits(bits, self.template.ranks)
        return replace(trained, core=core, warnings=undone_by_rounding(self.start, trained.core, core))

    def _held_out(self, cores: Mapping[str, Core]) -> dict[str, float]:
        if not cores:
            return {}
        model, pad_id = self.adapted.model, self.inputs.encoder.pad_id
        stack = CoreStack(model, len(cores))
        for slot, of_tenant in enumerate(cores.values()):
            stack.fill(slot, of_tenant)
        sets = [self.rows_of[name][0].rows.held_out for name in cores]
        losses = held_out_losses(model, sets, pad_id=pad_id, with_cores=stack.of_slots)
        return dict(zip(cores, losses, strict=True))

    def _finish(self, name: str, trained: Trained, loss: float, diverged: str | None) -> TenantOutcome:
        """Write a tenant's folder; if another process has begun to use it, nothing there is changed."""
        folder, failure = self.folder / name, self._failure(name, "diverged", diverged) if diverged else None
        try:
            with locked(folder):
                require_unused(folder)  # another process may have used it meanwhile
                if failure is not None:
                    write_json(folder / FAILURE, failure.content())
                    return failure
                (folder / FAILURE).unlink(missing_ok=True)  # of an earlier run into this folder
                with atomic_folder(folder, overwrite=None) as aside:
                    return self._write(name, trained, loss, aside)
        except (FrozenCoreError, OSError) as error:
            return self._failure(name, NOT_WRITTEN, str(error))

    def _failure(self, name: str, reason: str, message: str) -> Failure:
        device = next(self.adapted.model.parameters()).device
        config = self.rows_of[name][0].config.content()
        return Failure(reason=reason, message=message, config=config, provenance=Provenance.here(device))

    def _write(self, name: str, trained: Trained, loss: float, folder: Path) -> TunedRecord:
        (tenant, recipe), after = self.rows_of[name], Score(loss)
        assert trained.core is not None
        self.template.write(folder / ADAPTER, trained.core, scores=headline(after))
        rows = dict(tenant.rows.fingerprints)
        if tenant.config.method.basis is None:
            rows["calibration"] = self.inputs.rows.fingerprints["calibration"]  # rows of every tenant
        record = make_record(
            tenant.config,
            replace(self.inputs, rows=tenant.rows),
            self.adapted,
            recipe,
            trained.report,
            (Score(self.before[name]), after),
            core=trained.core,
            hashes={**rows, **self.hashes},
            folder=folder,
            memory=self.memory,
            started=self.started,
            warnings=trained.warnings,
            company=self.company,
        )
        write_json(folder / RECORD, record.content())
        return record


class Manifest(RecordPart):
    """The inputs of the basis beside the tenants.

    Attributes:
        identity: The options that determine it, and hashes of the base model and of the calibration rows.
        basis: The id of the basis; None until it is saved.
        made: The calibration, for the tenants' records.
    """

    identity: dict[str, Any]
    basis: str | None = None
    made: CalibratedAdapter | None = None

    @classmethod
    def read(cls, file: Path) -> Manifest | None:
        """Read the manifest; None if there is none."""
        if not file.exists():
            return None
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArtifactError(f"{file} is damaged ({one_line(error, 120)}). Choose another --out.") from error


def adapt_for_all(
    config: RunConfig,
    inputs: Inputs,
    targets: Targets,
    out: Path,
    hashes: Mapping[str, str],
    options: str,
    progress: Progress,
) -> Adapted:
    """Add the adapter of all tenants to the model, and save its basis in ``out/basis`` if it has no name yet.

    A resumed run loads that basis. ``out/tenants.json`` says what the basis was made of: it is written before the
    basis, and again after it with the calibration, for the tenants' records. The given ``options`` are written
    first, because ``--resume`` goes on with them.

    Args:
        hashes: SHA-256 of the base model and of its configuration.

    Raises:
        ArtifactError: ``out/basis`` is another one, of a run with other options or rows.
    """
    if config.method.basis is not None:
        return adapt(config.method, inputs, targets, progress)
    folder, file = out / BASIS, out / MANIFEST_FILE
    of_method = {
        name: one
        for name, one in run_options().items()
        if one.part == "method" and one.group != "calibration" and name != "bits"
    }
    identity = {
        **{name: as_json(one.value_in(config)) for name, one in of_method.items()},
        **options_of_sums(vars(config.method.calibration)),
        "seed": config.method.seed,
        "base model": hashes["model"],
        "configuration of the base model": hashes["config"],
        "calibration rows": inputs.rows.fingerprints["calibration"],
    }
    before = Manifest.read(file)
    if before is not None:
        way_out = f"Give the same, choose another --out, or train new tenants without the others: --basis {folder}."
        refuse_differing(str(file), before.identity, identity, way_out=way_out)
    elif folder.exists():
        raise ArtifactError(
            f"Tenants train on the basis that their options give, but {folder} is that of another run. Choose "
            "another --out, or name that basis with --basis."
        )
    if before is not None and before.made is not None:
        on_basis = replace(config.method, basis=str(folder), layers=None)
        adapted = adapt(on_basis, inputs, targets, progress)
        refuse_differing(str(folder), {"basis": before.basis}, {"basis": basis_id(adapted.model)})
        return replace(adapted, made=before.made)
    adapted = adapt(config.method, inputs, targets, progress, measure_rate=True)
    if not adapted.model.peft_config["default"].initial_step:  # else each core is saved with its own basis
        if is_first():
            write_text(out / RUN_FILE, options)
        write_json(file, Manifest(identity=identity).content())
        source = calibrated_on(config, inputs.rows, adapted.made.calibration)
        saved = save_basis(adapted.model, folder, calibrated_on=source, overwrite=True)
        whole = Manifest(identity=identity, basis=saved, made=adapted.made)
        write_json(file, whole.content())
    return adapted
