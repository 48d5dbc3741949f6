"""The record of a run: one typed model, written when a run ends and checked whenever it is read.

``result.json`` of a run and each line of a campaign's ``records.jsonl`` hold a record; ``failure.json`` holds the
reason of a failure. Unknown keys, from a later version, are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import from_json

from frozencore.text import num_of, one_line
from frozencore.tune.calibration_record import Alignment, CalibrationSummary
from frozencore.tune.config import RunConfig
from frozencore.tune.provenance import Provenance
from frozencore.tune.record_part import Count, Finite, RecordPart, rounded
from frozencore.tune.rows.prompts import TooLong
from frozencore.tune.rows.row import CONTROL, NOT_WRITTEN, OTHER_PROMPT, OTHER_ROLE
from frozencore.tune.rows.row_sources import in_words

RECORD_FORMAT: Final = 1


class RecordedConfig(RecordPart):
    """The options of a run by name; those that a reader of records uses have types."""

    model: str
    dtype: str
    data: tuple[str, ...] | str | None = None

    @property
    def sources(self) -> str:
        """The sources of the user's own rows."""
        return in_words(self.data)

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        return cls.model_validate_json(json.dumps(config.content()))


class Hashes(RecordPart):
    """SHA-256 of the base weights, of the model's configuration, of each set of rows, of the choices of those to
    evaluate on, and of a core to start from; the id of the basis.

    ``basis`` is missing for methods without one, ``start`` if training started from zero, ``config`` in records of
    evaluations and of earlier versions.
    """

    model: str
    config: str | None = None
    train: str | None = None
    calibration: str | None = None
    evaluation: str | None = None
    validation: str | None = None
    choices: str | None = None
    others: str | None = None
    basis: str | None = None
    start: str | None = None


class SourceRows(RecordPart):
    """One of several sources of the user's rows: how many rows were read, and how many of them are used."""

    source: str
    read: Count
    drawn: Count


class ReadRows(RecordPart):
    """The reading of rows; a task has only ``left_out``.

    Attributes:
        read, columns, left_out: The number of rows, the columns, and the number of unused rows by reason.
        unused_columns: The columns that are not read.
        changed: The number of rows whose text was changed, or of which a chat template does not write all, by what.
        joined: The number of rows in which one token covers the end of the prompt and the beginning of the completion;
            missing if none.
        sources: The result of each of several sources.
        held_out_from: The source of the held-out rows (``eval_data``); missing if they are a part of ``read``.
    """

    read: Count | None = None
    columns: tuple[str, ...] = ()
    left_out: dict[str, Count] = Field(default_factory=dict)
    unused_columns: tuple[str, ...] = ()
    changed: dict[str, Count] = Field(default_factory=dict)
    joined: Count | None = None
    sources: tuple[SourceRows, ...] = ()
    held_out_from: str | None = None

    @property
    def in_words(self) -> str:
        why = ", ".join(f"{count:,} left out ({why})" for why, count in self.left_out.items())
        if self.read is None:
            return f"Rows of the task: {why}."
        columns = " and ".join(self.columns)
        sentence = f"Read {num_of(self.read, 'row')} by {columns}; {why or 'none left out'}."
        each = "; ".join(f"{one.source}: {one.drawn:,} of {num_of(one.read, 'row')}" for one in self.sources)
        other = "" if self.held_out_from is None else f" Held-out rows are those of {self.held_out_from}."
        return f"{sentence}{f' {each}.' if each else ''}{''.join(f' {line}.' for line in self.not_as_given)}{other}"

    @property
    def not_as_given(self) -> list[str]:
        """The parts of the rows in use that were not read, or were changed."""
        unused = " and ".join(self.unused_columns)
        lines = [f"{num_of(len(self.unused_columns), 'column')} not used: {unused}"] if unused else []
        for what, count in self.changed.items():
            rows = num_of(count, "row")
            as_given = what.startswith((NOT_WRITTEN, CONTROL, OTHER_PROMPT, OTHER_ROLE))
            lines.append(f"in {rows} {what}" if as_given else f"{rows} changed: {what}")
        if self.joined:
            where = "one token holds the end of the prompt and the beginning of the completion"
            way_out = "end prompts without a space and begin completions with one"
            lines.append(f"in {num_of(self.joined, 'row')} {where}; {way_out}")
        return lines


class UsedRows(ReadRows):
    """The number of training rows and of scored rows, and whether evaluation or validation rows were scored.

    Attributes:
        validation_from: The source of validation rows, also if they are not used.
        cut, skipped: The number of long rows whose prompt was cut, and that were left out; missing if not allowed.
    """

    trained: Count
    scored: Count
    scored_on: str
    validation_from: str
    cut: Count | None = None
    skipped: Count | None = None

    @property
    def lines(self) -> list[str]:
        """Sentences on the rows that were read, cut and left out."""
        read = [self.in_words] if self.read is not None or self.left_out else []
        if self.cut:
            read.append(f"{num_of(self.cut, 'prompt')} cut at the beginning (--too-long cut).")
        if self.skipped and self.read is None:  # else the first sentence says it
            read.append(f"{num_of(self.skipped, 'row')} too long and left out (--too-long).")
        return read


class TaskScore(RecordPart):
    """The share of right answers. A count that is not made for such answers is missing.

    Attributes:
        held_out_loss: Nats per completion token, including the end token.
        time_s: Wall time of scoring, including the held-out loss.
        chance: Expected accuracy of a uniform guess; ``None`` for generated answers.
        majority_class: Accuracy of always giving the most frequent answer; ``None`` for numbers, and for completions
            that all differ.
        num_ties: Choice tasks: examples in which several choices share the best log-likelihood (the first counts).
        num_duplicate_choices: Choice tasks: examples with two equal choices.
        num_cut: Prompts whose beginning was cut because of the length limit.
        num_truncated: Generated answers that reached the length limit before the end token.
        num_unanswered: Numbers: texts without a marker followed by a number.
        accuracy: Share of right answers, from 0 to 1.
        standard_error: Standard error of that share over the rows: ``sqrt(p (1 - p) / (n - 1))``.
        correct: A character for each scored row, in order: 1 if the answer was right, else 0.
    """

    task: str
    held_out_loss: float
    time_s: float
    chance: float | None = None
    majority_class: float | None = None
    num_ties: Count = 0
    num_duplicate_choices: Count = 0
    num_cut: Count = 0
    num_truncated: Count = 0
    num_unanswered: Count = 0
    num_examples: Count
    accuracy: float
    standard_error: float
    correct: Annotated[str, Field(pattern="^[01]+$")]


class RowLosses(RecordPart):
    """The held-out loss of each scored row, in order: the summed nats of its completion, and its tokens.

    Attributes:
        numbers: The number of each row in its split, which tells the rows that several runs share; empty if the ids of
            the rows are not a split's name and a number.
    """

    numbers: tuple[Count, ...]
    nats: tuple[float, ...]
    tokens: tuple[Count, ...]

    @property
    def mean(self) -> float:
        """Nats per token over all rows."""
        return math.fsum(self.nats) / sum(self.tokens)

    @property
    def recorded(self) -> Self | None:
        """The same with six digits, for a record; None without numbers."""
        return self.model_copy(update={"nats": rounded(self.nats)}) if self.numbers else None


class TrainedSteps(RecordPart):
    """Optimizer steps, and their losses in nats per completion token.

    Attributes:
        final_loss: The mean over the last tenth of the steps.
    """

    num_steps: Count
    final_loss: float | None = None
    losses: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, losses: Sequence[float]) -> Self:
        tail = losses[-math.ceil(len(losses) / 10) :]
        return cls(num_steps=len(losses), final_loss=sum(tail) / len(tail) if tail else None, losses=tuple(losses))


class OtherTask(RecordPart):
    """Nats per token of another task's texts before and after training."""

    loss_before: Finite
    loss: Finite


class StepScored(RecordPart):
    """The validation scores after a step; no accuracy if only the loss was requested."""

    step: Count
    held_out_loss: float
    accuracy: float | None = None


class SelectedCheckpoint(RecordPart):
    """The step that a run kept, and its choice.

    Attributes:
        every: Steps between two scores, or ``epoch``.
        by: ``accuracy`` (ties go to the lower held-out loss, then to the earlier step) or ``held_out_loss``; missing if
            there were no validation rows and the last step was kept.
        rows: The number of validation rows; their source is in the run's ``rows``.
        time_s: Seconds of scoring, not included in ``training_s``.
        stopped_early: The training ended early because the scores stopped improving.
    """

    every: Literal["epoch"] | Count
    rows: Count
    kept_step: Count
    by: Literal["accuracy", "held_out_loss"] | None = None
    scores: tuple[StepScored, ...] = ()
    time_s: float = 0.0
    stopped_early: bool = False


class TenantGroup(RecordPart):
    """The number of tenants that trained together with this one, and how many trained at once.

    ``training_s`` is the tenant's share of the common steps, by tokens. Calibration and ``total_s`` are for all tenants
    together.
    """

    tenants: Count
    slots: Count


class Resources(RecordPart):
    """The cost of the method, in the quantities of the paper's tables.

    Attributes:
        magnitude_parameters: The number of trained values that are DoRA's magnitudes.
        saved_bytes_without_bases: The bytes to save if bases can be computed again.
        step_s: Median; None for a single step, and if a resumed run had no step left.
    """

    magnitude_parameters: Count
    saved_bytes_without_bases: Count
    step_s: float | None


class Resolved(RecordPart):
    """The decisions that the configuration left open. Chat uses style, dtype and system text, evaluate the style.

    Attributes:
        prompt_style: ``chat`` (the tokenizer's template) or ``plain``.
        dtype: The dtype of the base model's weights, such as ``bfloat16``.
        system: The system text that all conversations of the training rows begin with; None if there is none.
        started_from: The adapter whose core training started from; None for a start from zero.
    """

    targets: tuple[str, ...] | str
    recipe: dict[str, Any]
    max_length: Count
    prompt_style: Literal["chat", "plain"]
    dtype: str
    system: str | None = None
    started_from: str | None = None


P = TypeVar("P", bound=RecordPart)


class RunRecord(RecordPart):
    """The record of any run; ``run_id`` is its name in a campaign."""

    format: Literal[1]
    config: RecordedConfig
    provenance: Provenance
    run_id: str | None = None

    def has(self, name: str) -> bool:
        """Return whether the record has this key. A number that was not finite is recorded as null."""
        return name in self.model_fields_set


class TunedRecord(RunRecord):
    """The record of a run that trained.

    Attributes:
        accuracy, score: Missing for plain text.
        held_out_loss: Nats per completion token.
        selection: Missing if no step was chosen and the last was kept.
        company: Missing if the run trained alone.
        forgetting: The loss on the texts of other tasks, by task; missing if not scored.
        row_losses: The held-out loss of each scored row, in order; missing if the rows have no numbers.
        num_trainable: The number of values that train at the same time.
        state_held_bytes: The peak of the training state (:mod:`frozencore.tune.training.callbacks`) in one process; for
            runs that train together, the run's share.
        saved_bytes: Size of the adapter's tensor files.
        model_bytes: Size of the base model's loaded weights.
        processes: The number of processes; missing if one.
        alignment: None for methods without bases, and if G, a and d were not available.
    """

    task: str | None
    method: str
    seed: Count
    hashes: Hashes
    rows: UsedRows
    held_out_loss_before: Finite
    held_out_loss: Finite
    accuracy_before: float | None = None
    accuracy: float | None = None
    score: TaskScore | None = None
    num_trainable: Count
    state_held_bytes: Count
    saved_bytes: Count
    model_bytes: Count
    calibration_s: float
    training_s: float
    total_s: float
    peak_memory_bytes: Count
    resources: Resources
    training: TrainedSteps
    selection: SelectedCheckpoint | None = None
    company: TenantGroup | None = None
    forgetting: dict[str, OtherTask] | None = None
    row_losses: RowLosses | None = None
    processes: Count | None = None
    resolved: Resolved
    calibration: CalibrationSummary | None = None
    alignment: Alignment | None = None
    warnings: tuple[str, ...] = ()

    @property
    def forgotten(self) -> float | None:
        """The rise of the loss on other tasks' texts in nats per token, averaged over tasks; None if not scored."""
        others = (self.forgetting or {}).values()
        rises = [one.loss - one.loss_before for one in others if one.loss is not None and one.loss_before is not None]
        return sum(rises) / len(rises) if rises else None

    def has(self, name: str) -> bool:
        return self.forgotten is not None if name == "forgotten" else super().has(name)


class StabilityRecord(RunRecord):
    """The record of a comparison of two calibration sets' bases: mean principal-angle cosines, total and by layer."""

    cosine_P: float | None
    cosine_Q: float | None
    layers: dict[str, dict[str, float]] = Field(default_factory=dict)
    num_calibration: dict[str, Count] = Field(default_factory=dict)
    reference_size: Count | None = None


class TaskResult(RecordPart):
    """The result of one subject on one task.

    Attributes:
        rows: SHA-256 of the rows as tokens.
        score: Missing for texts, and for own rows with a long completion.
        failure: Why the task has no result.
    """

    subject: str
    task: str
    num_examples: Count = 0
    rows: str | None = None
    held_out_loss: float | None = None
    score: TaskScore | None = None
    failure: str | None = None


class EvaluationRecord(RecordPart):
    """All scores of an evaluation: the content of ``OUT/result.json``.

    Attributes:
        adapters: The folder of each subject but the base model.
        adapter_tensors: SHA-256 of the tensors in each folder.
    """

    format: Literal[1]
    model: str
    adapters: dict[str, str]
    adapter_tensors: dict[str, str] = Field(default_factory=dict)
    prompt_styles: dict[str, str]
    dtype: str
    max_length: int
    too_long: TooLong
    length_normalised: bool
    scores: tuple[TaskResult, ...]
    reading: ReadRows | None = None
    hashes: Hashes
    provenance: Provenance

    @property
    def failed(self) -> dict[str, str]:
        """The reason of each missing score, by task."""
        return {score.task: score.failure for score in self.scores if score.failure is not None}


class Failure(RecordPart):
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
