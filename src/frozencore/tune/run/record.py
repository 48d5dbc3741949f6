"""The record of a run: one typed model, written when a run ends and checked whenever it is read.

``result.json`` of a run and each line of a campaign's ``records.jsonl`` hold a record; ``failure.json`` holds the
reason of a failure. Unknown keys, from a later version, are kept.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import from_json

from frozencore.tune.run.record_parts import (
    AccuracyDetails,
    CalibrationSummary,
    CompanySize,
    Count,
    Hashes,
    OtherTask,
    Part,
    Provenance,
    RecordedConfig,
    Resolved,
    Resources,
    RowLosses,
    SelectedCheckpoint,
    TrainedSteps,
    UsedRows,
)
from frozencore.words import one_line

RECORD_FORMAT: Final = 1
P = TypeVar("P", bound=Part)


class RunRecord(Part):
    """The record of any run; ``run_id`` is its name in a campaign."""

    format: Literal[1]
    config: RecordedConfig
    hashes: Hashes | None = None
    provenance: Provenance = Provenance()
    run_id: str | None = None

    def has(self, name: str) -> bool:
        """Return whether the record has this key; a null value is a number that was not finite."""
        return name in self.model_fields_set


class LayerCriteria(Part):
    """The criterion by layer: each tuple has one entry a layer, in the order of ``name``.

    Attributes:
        J: Squared whitened gradient inside the span, ``‖(PᵀDP)^-1/2 PᵀGQ (QᵀAQ)^-1/2‖²_F``.
        energy: ``‖T‖²_F`` of ``T = D^-1/2 G A^-1/2``, the upper limit of J.
        gradient, gradient_total: ``‖PᵀGQ‖_F`` and ``‖G‖_F``.
        leading: The first four singular values of the matrix whose squared norm is J; for ``fcca`` they are Σ.
        last: The r-th singular value.
        effective_rank: The number of singular values above rounding.
        participation: ``(Σσ²)² / Σσ⁴``, the number of singular values over which J is spread.
        input_spread, error_spread: Maximum over median of a and of d; None if the median is zero.
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
    """The share of the calibration rows' moments G, a, d that the bases capture before training.

    All runs use the same metric, diagonal on both sides with this relative ``damping``, so that runs can be compared.

    Attributes:
        J: Sum over the layers; the local model predicts that a step η lowers the loss by η/2 times J.
        J_share: J over the sum of all energy.
        gradient: ``‖PᵀGQ‖_F`` over all layers; ``gradient_share`` is its ratio to ``‖G‖_F``.
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
    """The record of a run that trained.

    Attributes:
        accuracy, score: Missing for plain text.
        held_out_loss: Nats per completion token.
        selection: Missing if no step was chosen and the last was kept.
        company: Missing if the run trained alone.
        forgetting: The loss on the texts of other tasks, by task; missing if not scored.
        row_losses: The held-out loss of each scored row, in order, missing in older records.
        values_at_once: The number of values that train at the same time.
        state_held_bytes: The peak of the training state (:mod:`frozencore.tune.training.callbacks`) in one process; for
            runs that train together, the run's share.
        saved_bytes: Size of the adapter's tensor files.
        model_bytes: Size of the base model's loaded weights.
        processes: The number of processes; missing if one.
        criterion: None for methods without bases, and if G, a and d were not available.
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
    state_held_bytes: Count
    saved_bytes: Count
    model_bytes: Count
    calibration_s: float
    training_s: float
    total_s: float | None = None
    peak_memory_bytes: Count
    resources: Resources | None = None
    training: TrainedSteps
    selection: SelectedCheckpoint | None = None
    company: CompanySize | None = None
    forgetting: dict[str, OtherTask] | None = None
    row_losses: RowLosses | None = None
    processes: Count | None = None
    resolved: Resolved | None = None
    calibration: CalibrationSummary | None = None
    criterion: Criterion | None = None
    warnings: tuple[str, ...] = ()

    @property
    def step_s(self) -> float | None:
        """Seconds of a step: the median, or the mean in older records."""
        if self.resources is not None:
            return self.resources.step_s
        return self.training_s / self.training.num_steps if self.training.num_steps else None

    @property
    def forgotten(self) -> float | None:
        """The rise of the loss on other tasks' texts in nats per token, averaged over tasks; None if not scored."""
        others = (self.forgetting or {}).values()
        rises = [one.loss - one.loss_before for one in others if one.loss is not None and one.loss_before is not None]
        return sum(rises) / len(rises) if rises else None

    def has(self, name: str) -> bool:
        return self.forgotten is not None if name == "forgotten" else super().has(name)

    @property
    def scores(self) -> dict[str, float]:
        """The existing scores before and after, by name."""
        found = {
            "loss_before": self.held_out_loss_before,
            "loss": self.held_out_loss,
            "accuracy_before": self.accuracy_before,
            "accuracy": self.accuracy,
        }
        return {name: score for name, score in found.items() if score is not None}


class StabilityRecord(RunRecord):
    """The record of a comparison of two calibration sets' bases: mean principal-angle cosines, total and by layer."""

    cosine_P: float | None
    cosine_Q: float | None
    layers: dict[str, dict[str, float]] = Field(default_factory=dict)
    num_calibration: dict[str, Count] = Field(default_factory=dict)
    reference_size: Count | None = None


class Failure(Part):
    """The reason why a run has no record."""

    reason: str
    message: str
    config: dict[str, Any] = Field(default_factory=dict)
    provenance: Provenance | None = None


def read_record(text: str) -> RunRecord:
    """Read a record from a JSON text.

    Raises:
        ValueError: The record is damaged; the message is one line.
    """
    content = from_json(text)
    compared = isinstance(content, dict) and "cosine_P" in content
    return _read(StabilityRecord if compared else TunedRecord, text)


def read_failure(text: str) -> Failure:
    """Read a failure from a JSON text; raises the errors of :func:`read_record`."""
    return _read(Failure, text)


def _read(kind: type[P], text: str) -> P:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(one_line(f"{place}: {first['msg'].lower()}", 200)) from error
