"""Write the results of a tenant that has ended: its adapter, and its record or the reason of its failure."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from frozencore.adapter.saved.card import write_model_card
from frozencore.adapter.swap import swap_core
from frozencore.files.whole_file import write_json
from frozencore.tune.config import RunConfig
from frozencore.tune.run.execute import LAST_GOOD
from frozencore.tune.run.make_record import calibrated_on, headline, make_record
from frozencore.tune.run.many.tenant_rows import TenantRows
from frozencore.tune.run.prepare import Score
from frozencore.tune.run.record import Failure, TunedRecord, read_record
from frozencore.tune.run.record_parts import Provenance
from frozencore.tune.run.run_folder import ADAPTER, FAILURE, RECORD
from frozencore.tune.run.training_port import Outcome, Training
from frozencore.tune.training.many.losses import held_out_losses
from frozencore.tune.training.many.slots import CoreStack
from frozencore.tune.training.many.tenant import Trained

TenantOutcome = TunedRecord | Failure
"""The content of a tenant's ``result.json`` or ``failure.json``."""


@dataclass(frozen=True)
class Finisher:
    """Score, save and record tenants when they end; existing results stay unchanged.

    Attributes:
        common: The training of all tenants: its rows are the calibration rows of the basis, its hashes those of the
            base model and the basis. The core of its model is replaced by each saved tenant's in turn.
        before: Held-out loss of the base model on each tenant's rows.
        side_by_side: The number of tenants, and how many train at once.
    """

    common: Training
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
        model, pad_id = self.common.model, self.common.prepared.encoder.pad_id
        stack = CoreStack(model, len(cores))
        for slot, of_tenant in enumerate(cores.values()):
            stack.put(slot, of_tenant)
        sets = [self.own[name].rows.held_out for name in cores]
        losses = held_out_losses(model, sets, pad_id=pad_id, through=stack.rows)
        return dict(zip(cores, losses, strict=True))

    def _record(self, name: str, trained: Trained, loss: float) -> TunedRecord:
        common, own, folder = self.common, self.own[name], self.common.folder / name
        self._save(own.config, trained, folder / ADAPTER)
        calibrated = common.prepared.rows.fingerprints["calibration"]  # rows of every tenant
        training = replace(
            common,
            config=own.config,
            prepared=replace(common.prepared, rows=own.rows, before=Score(self.before[name])),
            folder=folder,
            hashes={**own.rows.fingerprints, "calibration": calibrated, **common.hashes},
        )
        outcome, score = Outcome(training, replace(trained.report, side_by_side=self.side_by_side)), Score(loss)
        record = make_record(outcome, score, training.hashes)
        calibration = calibrated_on(common.config, common.prepared, common.calibration)
        write_model_card(folder / ADAPTER, calibration=calibration, scores=headline(score))
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
            provenance=Provenance.here(next(self.common.model.parameters()).device),
        )
        write_json(folder / FAILURE, failure.content())
        return failure

    def _save(self, config: RunConfig, trained: Trained, folder: Path) -> None:
        swap_core(self.common.model, trained.cores)
        config.method.entry.save(self.common.model, folder, folder.parent / "start")
