"""The record of a run: one typed model, written when a run ends and checked whenever it is read again.

``result.json`` of a run and each line of a campaign's ``records.jsonl`` hold one; ``failure.json`` holds why there is
none. A key that is not named here (of a later version) is kept as it came.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import from_json

from frozencore.tune.run.record_parts import (
    AccuracyDetails,
    Allocation,
    CalibrationSummary,
    CompanySize,
    Count,
    Hashes,
    OtherTask,
    Part,
    PrivateSpending,
    Provenance,
    RecordedConfig,
    Resolved,
    Resources,
    SelectedCheckpoint,
    TrainedSteps,
    UsedRows,
)
from frozencore.words import one_line

RECORD_FORMAT: Final = 1
P = TypeVar("P", bound=Part)


class RunRecord(Part):
    """Of any run; ``run_id`` names it in a campaign."""

    format: Literal[1]
    config: RecordedConfig
    hashes: Hashes | None = None
    provenance: Provenance = Provenance()
    run_id: str | None = None

    def has(self, name: str) -> bool:
        """Whether the record holds this key: null there is a number that was not finite."""
        return name in self.model_fields_set


class LayerCriteria(Part):
    """The criterion layer by layer: one entry of every tuple a layer, in the order of ``name``.

    Attributes:
        J: Squared whitened gradient inside the span, ``‖(PᵀDP)^-1/2 PᵀGQ (QᵀAQ)^-1/2‖²_F``.
        energy: ``‖T‖²_F`` of ``T = D^-1/2 G A^-1/2``: what J is a share of.
        gradient, gradient_total: ``‖PᵀGQ‖_F`` and ``‖G‖_F``.
        leading: The first four singular values of what J is the squared norm of; for ``fcca`` they are Σ.
        last: The r-th of them.
        effective_rank: How many of them stand above rounding.
        participation: ``(Σσ²)² / Σσ⁴``: over how many of them J is spread.
        input_spread, error_spread: Maximum over median of a and of d; None where the median is zero.
    """

    name: tuple[str, ...]
    J: tuple[float, ...]
    energy: tuple[float, ...]
    gradient: tuple[float, ...]
    gradient_total: tuple[float, ...]
    leading: tuple[tuple[float, ...], ...]
    last: tuple[float, ...]
    effective_rank: tuple[Count, ...]
    participation: tuple[float, ...]
    input_spread: tuple[float | None, ...]
    error_spread: tuple[float | None, ...]


class Criterion(Part):
    """What the bases capture of the moments G, a, d of the run's calibration rows, before any training.

    The metric is one for all runs, both sides in diagonal moments with this relative ``damping``, whatever the bases
    were chosen by: so runs compare.

    Attributes:
        J: Sum over the layers; η/2 of it is the decrease of the loss that the local model promises for a step η.
        J_share: Of the sum of all energy.
        gradient: ``‖PᵀGQ‖_F`` of all layers together, and ``gradient_share`` of ``‖G‖_F``.
        leading, last, effective_rank, participation, input_spread, error_spread: Medians over the layers.
    """

    damping: float
    J: float
    J_share: float
    gradient: float
    gradient_share: float
    leading: tuple[float, ...]
    last: float
    effective_rank: float
    participation: float
    input_spread: float | None
    error_spread: float | None
    layers: LayerCriteria


class TunedRecord(RunRecord):
    """Of a run that trained.

    Attributes:
        accuracy, score: Missing where plain text was learned.
        held_out_loss: Nats per completion token.
        private: Missing where the training had no budget.
        selection: Missing where the last step was kept unasked.
        company: Missing where the run trained alone.
        forgetting: By other task, the loss on its texts; missing where none were scored.
        values_at_once: How many values train at a moment.
        values_in_all: How many values were trained and saved: every round of a training in rounds trains others.
        state_held_bytes: The state held while training, at its peak (:mod:`frozencore.tune.training.callbacks`); of
            one of several processes, and of training in company the run's share.
        saved_bytes: What the adapter's own files of tensors take.
        model_bytes: What the weights of the base model take as they are loaded.
        processes: How many worked on it together; missing where one did.
        allocation: Missing where ranks were given.
        criterion: None for methods without bases, and where G, a and d were not at hand.
    """

    task: str | None
    method: str
    seed: Count
    rows: UsedRows | None = None
    held_out_loss_before: float | None
    held_out_loss: float | None
    accuracy_before: float | None = None
    accuracy: float | None = None
    score: AccuracyDetails | None = None
    values_at_once: Count
    values_in_all: Count
    state_held_bytes: Count
    saved_bytes: Count
    model_bytes: Count
    calibration_s: float
    training_s: float
    total_s: float | None = None
    peak_memory_bytes: Count
    resources: Resources | None = None
    training: TrainedSteps
    private: PrivateSpending | None = None
    selection: SelectedCheckpoint | None = None
    company: CompanySize | None = None
    forgetting: dict[str, OtherTask] | None = None
    processes: Count | None = None
    resolved: Resolved | None = None
    allocation: Allocation | None = None
    calibration: CalibrationSummary | None = None
    criterion: Criterion | None = None
    warnings: tuple[str, ...] = ()

    @property
    def step_s(self) -> float | None:
        """Seconds of a step: the median, or the mean in records that are older than it."""
        if self.resources is not None:
            return self.resources.step_s
        return self.training_s / self.training.num_steps if self.training.num_steps else None

    @property
    def forgotten(self) -> float | None:
        """Nats per token that other tasks' texts lost, the mean over these tasks; None where none were scored."""
        others = (self.forgetting or {}).values()
        rises = [one.loss - one.loss_before for one in others if one.loss is not None and one.loss_before is not None]
        return sum(rises) / len(rises) if rises else None

    def has(self, name: str) -> bool:
        return self.forgotten is not None if name == "forgotten" else super().has(name)

    @property
    def scores(self) -> dict[str, float]:
        """Before and after, by name; without those that there are not."""
        found = {
            "loss_before": self.held_out_loss_before,
            "loss": self.held_out_loss,
            "accuracy_before": self.accuracy_before,
            "accuracy": self.accuracy,
        }
        return {name: score for name, score in found.items() if score is not None}


class StabilityRecord(RunRecord):
    """Of a run that compared the bases of two calibration sets: mean principal-angle cosines, in all and by layer."""

    cosine_P: float | None
    cosine_Q: float | None
    layers: dict[str, dict[str, float]] = Field(default_factory=dict)
    num_calibration: dict[str, Count] = Field(default_factory=dict)
    reference_size: Count | None = None


class SweptRun(Part):
    """One of the runs of a sweep: its options, and on validation rows the loss of the step that it kept.

    Attributes:
        diverged: Why it ended early; it has no loss then.
    """

    options: dict[str, int | float]
    held_out_loss: float | None = None
    kept_step: Count | None = None
    diverged: str | None = None


class Sweep(Part):
    """What ``sweep.json`` holds: every run in its order, how many validation rows chose, and which was the best."""

    rows: Count
    runs: tuple[SweptRun, ...]
    best: Count


class Failure(Part):
    """Why a run has no record."""

    reason: str
    message: str
    config: dict[str, Any] = Field(default_factory=dict)
    provenance: Provenance | None = None


def read_record(text: str) -> RunRecord:
    """The record that a JSON text holds.

    Raises:
        ValueError: In one line, what is damaged.
    """
    content = from_json(text)
    compared = isinstance(content, dict) and "cosine_P" in content
    return _read(StabilityRecord if compared else TunedRecord, text)


def read_failure(text: str) -> Failure:
    """The failure that a JSON text holds; as :func:`read_record`."""
    return _read(Failure, text)


def _read(kind: type[P], text: str) -> P:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(one_line(f"{place}: {first['msg'].lower()}", 200)) from error
