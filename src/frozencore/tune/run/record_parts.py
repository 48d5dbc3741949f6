"""What the record of a run is made of: options, rows, hashes, provenance, training, cost."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from frozencore.tune.rows.mixture import in_words
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.provenance import provenance

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Part(BaseModel):
    """Strict, frozen, and keeps a key that it does not know (of a later version) as it came."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    def content(self) -> dict[str, Any]:
        """JSON values by key: what was given, and nothing for what was not."""
        return self.model_dump(mode="json", exclude_unset=True)


class RecordedConfig(Part):
    """The options of a run, under the names that they had when it was made; those read here have types."""

    rank: Count | None = None
    targets: tuple[str, ...] | str | None = None
    data: tuple[str, ...] | str | None = None
    dtype: str | None = None
    loss: str = "sft"
    core: dict[str, Any] = {}

    @property
    def sources(self) -> str:
        """The user's own rows, in words."""
        return in_words(self.data)

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        return cls.model_validate_json(config.model_dump_json())


class Provenance(Part):
    """As :func:`frozencore.tune.run.provenance.provenance` tells it."""

    versions: dict[str, str] = {}
    python: str | None = None
    commit: str | None = None
    platform: str | None = None
    device: str | None = None
    num_threads: Count | None = None

    @classmethod
    def here(cls) -> Self:
        return cls(**provenance())


class Hashes(Part):
    """SHA-256 of the base weights, of each set of rows, and of the bases, which only frozen cores have."""

    model: str
    train: str | None = None
    calibration: str | None = None
    evaluation: str | None = None
    validation: str | None = None
    others: str | None = None
    basis: str | None = None


class SourceRows(Part):
    """One of several sources of own rows; ``weight`` is missing where all rows of all sources were taken."""

    source: str
    weight: float | None = None
    read: Count
    drawn: Count


class UsedRows(Part):
    """How many rows were trained and scored on, and which: those to evaluate on, or those to validate on.

    Attributes:
        cut, skipped: How many of all rows lost the beginning of their prompt, or were left out, as too long; missing
            where neither was allowed.
        read, columns, left_out: Of own data, how many rows there were, the columns that were read, and how many were
            neither trained on nor held out, by why.
        packed: Into how many rows documents to train on were packed, which ``trained`` then counts; missing where not.
        sources: Of own data from several sources, what came of each.
        held_out_from: The file of the held-out rows (``eval_data``); missing where they are a part of ``read``.
    """

    trained: Count
    scored: Count
    scored_on: str
    validation_from: str
    cut: Count | None = None
    skipped: Count | None = None
    read: Count | None = None
    columns: tuple[str, ...] = ()
    left_out: dict[str, Count] = {}
    packed: Count | None = None
    sources: tuple[SourceRows, ...] = ()
    held_out_from: str | None = None


class AccuracyDetails(Part):
    """What belongs to an accuracy, as :class:`frozencore.tune.scoring.score.TaskScore` has it.

    Attributes:
        correct: A letter for each scored row, in their order: 1 where the run was right, else 0.
    """

    standard_error: float
    chance: float | None = None
    majority_class: float | None = None
    correct: Annotated[str, Field(pattern="^[01]+$")] | None = None


class TrainedSteps(Part):
    """Optimiser steps, and their losses in nats per completion token: those of a private training are not told."""

    num_steps: Count
    final_loss: float | None = None
    losses: tuple[float | None, ...] = ()


class PrivateSpending(Part):
    """The budget of a private training, its noise, and what its steps have spent.

    Attributes:
        epsilon, delta, clip: As :class:`frozencore.privacy.PrivateBudget` has them.
        num_rows, rows_a_step, num_steps, noise_multiplier: As :class:`frozencore.privacy.Schedule` has
            them.
        spent: The epsilon of the steps that were made.
    """

    epsilon: float
    delta: float
    clip: float
    num_rows: Count
    rows_a_step: Count
    num_steps: Count
    noise_multiplier: float
    spent: float


class OtherTask(Part):
    """Nats per token of another task's texts before and after the training; none where they were not finite."""

    loss_before: float | None
    loss: float | None


class StepScored(Part):
    """What validation rows said of the values after a step; no accuracy where the loss alone was asked for."""

    step: Count
    held_out_loss: float
    accuracy: float | None = None


class SelectedCheckpoint(Part):
    """Which step's values a run kept, and how that was chosen.

    Attributes:
        every: Steps between two scores, or ``epoch``.
        by: ``accuracy`` (ties go to the lower held-out loss, then to the earlier step) or ``held_out_loss``; missing
            where there were no validation rows, and the last step was kept.
        rows: How many validation rows were scored; where they come from stands under the run's ``rows``.
        time_s: Seconds of scoring, which are no part of ``training_s``.
        stopped_early: The scores were no better any more.
    """

    every: Literal["epoch"] | Count
    rows: Count
    kept_step: Count
    by: Literal["accuracy", "held_out_loss"] | None = None
    scores: tuple[StepScored, ...] = ()
    time_s: float = 0.0
    stopped_early: bool = False


class CompanySize(Part):
    """Of how many tenants a run was one, and how many trained at once.

    Its ``training_s`` is its share of the common steps, by tokens. Calibration and ``total_s`` are of all
    together.
    """

    tenants: Count
    slots: Count


class PhasePeaks(Part):
    """The largest memory of each phase (``frozencore.tune.run.costs``), what was held before it included.

    Attributes:
        measured: On the GPUs of the model (``device``), or resident in the ``process``, Python and libraries included.
        held_bytes: With the base model loaded and scored, before the adapter was put on it.
    """

    measured: Literal["device", "process"]
    held_bytes: Count
    calibration_bytes: Count
    training_bytes: Count
    scoring_bytes: Count


class Resources(Part):
    """What the method cost, in the terms of the paper's tables.

    Attributes:
        magnitude_parameters: Those of the values that train that are DoRA's magnitudes.
        saved_bytes_without_bases: What must be saved where bases can be made again.
        step_s: Median; None for a single step.
        peaks: None where the system does not tell phases apart.
    """

    magnitude_parameters: Count | None = None
    saved_bytes_without_bases: Count | None = None
    calibration_s: float | None = None
    step_s: float | None = None
    num_steps: Count | None = None
    peak_memory_bytes: Count | None = None
    peaks: PhasePeaks | None = None


class Resolved(Part):
    """What the configuration left open, as it was decided."""

    targets: tuple[str, ...] | str
    recipe: dict[str, Any]
    max_length: Count


class Allocation(Part):
    """A rank budget, in trained values, and the rank of each layer that it was for; 0 is not adapted."""

    budget: Count
    ranks: dict[str, Count]


class CalibrationSummary(Part):
    """The calibration pass over all layers; a median is None where it is not finite."""

    collect_s: float
    build_s: float
    num_layers: Count
    num_tokens: Count
    smallest_effective_rank: Count
    median_spread: dict[str, float | None]
