"""Runs of a study with ``fuse`` that share all but what their training is by, and so train in company.

Their bases are the same: the first of them that is made trains all their cores in common steps and leaves each to its
run in ``shared/company``. All else (basis, scores, adapter, record) each run does by itself, as if it were alone; so a
run that is killed, fails or is made elsewhere is no matter of the others.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn

from frozencore.adapter.swap import swap_core
from frozencore.errors import DivergenceError
from frozencore.fingerprint import fingerprint_options
from frozencore.lab.campaign.job import Job
from frozencore.lab.campaign.plan import Planned
from frozencore.lab.campaign.spec import Campaign
from frozencore.lab.campaign.store import Store
from frozencore.lab.run.bench import Bench
from frozencore.lab.run.config import RunConfig
from frozencore.lab.run.config_rules import of_one_alone
from frozencore.lab.run.execute import recipe_of, train_once
from frozencore.lab.run.files import CHECKPOINTS
from frozencore.lab.run.many.sweep import SWEPT
from frozencore.lab.run.named_basis import on_named_basis
from frozencore.lab.run.selecting import selection_of
from frozencore.lab.training.checkpoints import checkpoints
from frozencore.lab.training.many.checkpoint import identity_of, read_trained, write_trained
from frozencore.lab.training.many.seat import Trained
from frozencore.lab.training.many.slots import TrainedSlots
from frozencore.lab.training.many.tenant import Tenant, Validation
from frozencore.lab.training.many.train import SLOTS, train_many
from frozencore.lab.training.reporting import Reports
from frozencore.lab.training.train import TrainingReport
from frozencore.progress import Progress


def company_keys(campaign: Campaign, planned: Iterable[Planned]) -> dict[str, str]:
    """By id of a run that may train in company, what is the same for all that may train along."""
    jobs = {run.job.id: run.job for run in planned if run.job and campaign.studies[run.study].fuse}
    keys = {run_id: _key(job) for run_id, job in jobs.items()}
    return {run_id: key for run_id, key in keys.items() if key is not None}


def company_sizes(keys: Mapping[str, str], left: Iterable[str]) -> dict[str, int]:
    """Of the runs that are left, how many train together, for each that trains in company."""
    by_key = defaultdict(list)
    for run_id in left:
        if run_id in keys:
            by_key[keys[run_id]].append(run_id)
    return {run_id: len(members) for members in by_key.values() if len(members) > 1 for run_id in members}


def _key(job: Job) -> str | None:
    """None for a run that trains no cores, can only train alone, or whose time is its
    result."""
    config = job.config
    if job.kind != "tune" or not config.method_entry.has_bases or of_one_alone(config):
        return None
    known_by_weights = config.method_entry.weights_only or config.basis is not None
    is_seeded = bool(config.moments_needed) or not known_by_weights
    own = {option for option in SWEPT if option != "seed" or not is_seeded}
    return fingerprint_options(config.model_dump(mode="json", exclude=own))


@dataclass(frozen=True)
class CompanyTraining:
    """Trains a run along with others, or takes what one of them has left; alone otherwise (:data:`Train`).

    Attributes:
        others: Configurations of the runs that are to train along, by id.
    """

    store: Store
    run_id: str
    others: Mapping[str, RunConfig] = field(default_factory=dict)

    def __call__(
        self,
        config: RunConfig,
        model: PeftModel,
        bench: Bench,
        out: Path,
        resume: bool,
        identity: Mapping[str, Any],
        progress: Progress,
        reports: Reports | None,
    ) -> tuple[RunConfig, TrainingReport]:
        begun_alone = bool(checkpoints(out / CHECKPOINTS))
        found = None
        if trained_file(self.store, self.run_id).exists() or (self.others and not begun_alone):
            found = self._trained(config, model, bench, str(identity["base model"]), progress)
        if found is None:
            return train_once(config, model, bench, out, resume, identity, progress, reports)
        swap_core(model, found.cores)
        if found.diverged is not None:
            raise DivergenceError(found.diverged)
        return config, found.report

    def _trained(
        self, config: RunConfig, model: PeftModel, bench: Bench, base: str, progress: Progress
    ) -> Trained | None:
        """What became of the run in company; None where nobody has trained it or is to train along."""
        own = {self.run_id: _tenant(config, bench, progress)}
        kept = self._kept(model, own[self.run_id], base)
        if kept is not None or not self.others:
            return kept
        tenants = own | {
            run_id: _tenant(on_named_basis(other), bench, progress) for run_id, other in self.others.items()
        }
        folder = company_folder(self.store, tenants)
        trained = train_many(
            model,
            tenants,
            pad_id=bench.encoder.pad_id,
            checkpoint_dir=folder,
            resume=True,
            identity={"base model": base},
            progress=progress,
        )
        size = len(tenants), min(SLOTS, len(tenants))
        trained = {name: replace(one, report=replace(one.report, company=size)) for name, one in trained.items()}
        for run_id, one in trained.items():
            write_trained(trained_file(self.store, run_id), one, _identity(model, tenants[run_id], base))
        shutil.rmtree(folder)
        return trained[self.run_id]

    def _kept(self, model: nn.Module, tenant: Tenant, base: str) -> Trained | None:
        """What another run has left to this one; None where it is damaged, or of another basis, rows or recipe."""
        try:
            trained, found = read_trained(trained_file(self.store, self.run_id))
        except ValueError:
            return None
        return trained if found == _identity(model, tenant, base) else None


def trained_file(store: Store, run_id: str) -> Path:
    """Where a run finds its core when another one has trained it."""
    return _folder(store) / f"{run_id}.safetensors"


def company_folder(store: Store, run_ids: Iterable[str]) -> Path:
    """Where the checkpoints of a company are while it trains."""
    return _folder(store) / fingerprint_options({"runs": sorted(run_ids)})[:16]


def _folder(store: Store) -> Path:
    return store.shared / "company"


def _identity(model: nn.Module, tenant: Tenant, base: str) -> dict[str, Any]:
    return {"base model": base, **identity_of({"run": tenant}, TrainedSlots(model, 1))}


def _tenant(config: RunConfig, bench: Bench, progress: Progress) -> Tenant:
    """A run by its recipe and by what chooses among its steps; its rows are those of all."""
    selection, rows, validation = selection_of(config, bench, progress), bench.rows.validation, None
    if selection is not None and rows is not None:
        validation = Validation(
            rows.tokens,
            selection.every,
            selection.patience,
            score=lambda model: selection.score(model, lambda *_: None),
            scored_by=selection.identity,
        )
    return Tenant(bench.rows.train, recipe_of(config, bench.rows, bench.model), validation)
