"""``tune-many``: train a core for each tenant on its own rows, together on one basis, and save and record each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from frozencore.adapter.loaded_basis import basis_id
from frozencore.adapter.swap import swap_core
from frozencore.files.atomic_write import remove_left, write_text
from frozencore.files.fingerprint import fingerprint_tensors, fingerprints_of
from frozencore.files.names import BASIS, MANIFEST_FILE, RUN_FILE, UNFINISHED_FOLDER
from frozencore.progress import Progress, as_stage
from frozencore.tune.adapt import starting_core, with_rate
from frozencore.tune.config import RunConfig, as_flags
from frozencore.tune.cost import PeakMemory
from frozencore.tune.folder import locked
from frozencore.tune.load import resolve_targets
from frozencore.tune.many.basis import adapt_for_all
from frozencore.tune.many.finisher import Finisher, TenantOutcome, saved_template
from frozencore.tune.many.folder import refuse_taken, require_basis, resume_key, standing_record
from frozencore.tune.many.slots import held_out_losses
from frozencore.tune.many.tenant import SLOTS, Tenant, Validation, train_many
from frozencore.tune.many.tenant_rows import TenantRows, naming_tenant, read_tenants, tenants_of
from frozencore.tune.many.unfinished import UnfinishedFiles
from frozencore.tune.process_group import use_own_gpu
from frozencore.tune.processes import is_first, num_started
from frozencore.tune.record import RecordedConfig, TenantGroup
from frozencore.tune.run import recipe_of


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
        tenants = _with_rates(
            {name: tenants[name] for name in to_train}, adapted.model, inputs.encoder.pad_id, progress
        )
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
            tenants,
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


def _with_rates(tenants: Mapping[str, Tenant], model: nn.Module, pad_id: int, progress: Progress) -> dict[str, Tenant]:
    """The tenants with a learning rate, measured for each whose recipe has none."""
    found = {}
    for number, (name, tenant) in enumerate(tenants.items(), start=1):
        of_all = partial(_measuring, progress, number, len(tenants))
        with naming_tenant(repr(name)):
            found[name] = replace(tenant, recipe=with_rate(tenant.recipe, model, pad_id, tenant.rows, of_all))
    return found


def _measuring(progress: Progress, number: int, total: int, *_: object) -> None:
    """Report whose rate is measured, with a line for all tenants and not for each."""
    progress("rate", number, total)
