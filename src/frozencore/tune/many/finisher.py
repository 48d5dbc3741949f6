"""The end of tenants: each is rounded, scored and saved in a folder of its own, with its record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from frozencore.adapter.bank import CoreStack
from frozencore.adapter.card import write_model_card
from frozencore.adapter.core import Core
from frozencore.adapter.folders import SavedAdapter, read_adapter
from frozencore.errors import DivergenceError, FrozenCoreError
from frozencore.files.atomic_write import atomic_folder, write_json
from frozencore.files.names import ADAPTER
from frozencore.tune.adapt import Adapted, undone_by_rounding
from frozencore.tune.adapters import save_adapter
from frozencore.tune.config import RunConfig
from frozencore.tune.cost import PeakMemory
from frozencore.tune.folder import FAILURE, RECORD, START, locked
from frozencore.tune.load import Inputs
from frozencore.tune.make_record import calibrated_on, headline, make_record
from frozencore.tune.many.folder import require_unused, unfinished_file
from frozencore.tune.many.slots import held_out_losses
from frozencore.tune.many.tenant import Trained
from frozencore.tune.many.tenant_rows import TenantRows
from frozencore.tune.provenance import Provenance
from frozencore.tune.record import Failure, TenantGroup, TunedRecord
from frozencore.tune.run import scoring_trained
from frozencore.tune.scoring.score import Score
from frozencore.tune.training.recipe import Recipe

NOT_WRITTEN = "not written"
TenantOutcome = TunedRecord | Failure
"""The content of a tenant's ``result.json`` or ``failure.json``."""


def saved_template(config: RunConfig, inputs: Inputs, adapted: Adapted, folder: Path) -> SavedAdapter:
    """Save the run's adapter in a folder: each tenant gets its files, except for the core and the scores in the card.

    Args:
        inputs: Their rows are those of the calibration.
    """
    save_adapter(config.method.entry, adapted.model, folder / ADAPTER, folder / START)
    source = calibrated_on(config, inputs.rows, adapted.made.calibration)
    write_model_card(folder / ADAPTER, calibration=source, scores=headline(Score(0.0)))
    return read_adapter(folder / ADAPTER)


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
        try:
            with scoring_trained(self.rows_of[name][1]):
                core = trained.core.in_bits(bits, self.template.ranks)
        except DivergenceError as error:
            return replace(trained, core=None, diverged=str(error))
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
