"""The results of a campaign: each planned run beside what became of it, read from records alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from frozencore.errors import ArtifactError
from frozencore.tune.run.record import Failure, RunRecord
from frozencore_lab.campaign.plan import Axes, Choice, Outcome, Planned, choices, plan
from frozencore_lab.campaign.spec import Campaign, Study
from frozencore_lab.campaign.store import Store


@dataclass(frozen=True)
class FinalRun:
    """One final run of a study: the values of the study's axes, and its record or its failure."""

    axes: Axes
    run_id: str | None
    record: RunRecord | None
    failure: Failure | None


@dataclass(frozen=True)
class StudyResults:
    """The final runs of one study, and what its search chose: group of axis values, choice."""

    name: str
    study: Study
    runs: tuple[FinalRun, ...]
    choices: tuple[tuple[Axes, Choice], ...]

    @property
    def missing(self) -> tuple[FinalRun, ...]:
        return tuple(run for run in self.runs if run.record is None)


@dataclass(frozen=True)
class CampaignResults:
    campaign: Campaign
    studies: tuple[StudyResults, ...]


def load_results(folder: Path) -> CampaignResults:
    """The results in a campaign's folder.

    Raises:
        ArtifactError: It is no campaign folder, or runs of one model were made on different weights.
    """
    store = Store(folder)
    campaign = store.campaign()
    planned = plan(campaign, store.outcome)
    _require_one_base(planned, store)
    chosen = choices(campaign, store.outcome)
    return CampaignResults(
        campaign,
        tuple(
            StudyResults(
                name,
                study,
                tuple(_final(run, store) for run in planned if run.study == name and run.phase == "final"),
                tuple((group, choice) for other, group, choice in chosen if other == name),
            )
            for name, study in campaign.studies.items()
        ),
    )


def _require_one_base(planned: list[Planned], store: Store) -> None:
    """Refuse to set runs beside one another that name one model, in one dtype, and were made on different weights."""
    found: dict[tuple[str, str | None], dict[str, str]] = {}
    for run in planned:
        outcome = store.outcome(run.job.id) if run.job else None
        if run.job and outcome and outcome.record and outcome.record.hashes:
            of = run.job.config.model, outcome.record.config.dtype
            found.setdefault(of, {}).setdefault(outcome.record.hashes.model, run.job.id)
    for (model, _), runs in found.items():
        if len(runs) > 1:
            first, other = list(runs.values())[:2]
            raise ArtifactError(
                f"The runs {first} and {other} name the model {model!r} and were made on different weights: they do "
                "not compare. Remove those of the wrong one and run the campaign again."
            )


def _final(run: Planned, store: Store) -> FinalRun:
    outcome = (store.outcome(run.job.id) if run.job else None) or Outcome()
    failure = outcome.failure or (Failure(reason="search", message=run.blocked) if run.blocked else None)
    return FinalRun(run.axes, run.job.id if run.job else None, outcome.record, failure)
