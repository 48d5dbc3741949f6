"""What a report can show of a run."""

from __future__ import annotations

from dataclasses import dataclass

from frozencore_lab.campaign.results import StudyResults


@dataclass(frozen=True)
class Measure:
    """What a table shows.

    Attributes:
        key: In a record; ``scale`` times it is shown.
        before: In a record, the same of the untouched model.
        ranked: Whether one value is better than another.
        diverged: What a run that diverged counts as where a study counts it.
        suffix: Of the names of its files.
    """

    key: str
    title: str
    decimals: int
    scale: float = 1.0
    lower_is_better: bool = False
    before: str | None = None
    ranked: bool = True
    diverged: float | None = None
    suffix: str = ""


ACCURACY = Measure("accuracy", "accuracy, %", 1, scale=100.0, before="accuracy_before", diverged=0.0)
LOSS = Measure(
    "held_out_loss",
    "held-out loss, nats per token",
    3,
    lower_is_better=True,
    before="held_out_loss_before",
    suffix="-loss",
)
FORGOTTEN = Measure(
    "forgotten", "rise of the loss on other tasks' texts, nats per token", 3, lower_is_better=True, suffix="-forgotten"
)
COSINES = (
    Measure("cosine_P", "mean principal-angle cosine of P to the reference", 3, ranked=False, suffix="-cos-p"),
    Measure("cosine_Q", "mean principal-angle cosine of Q to the reference", 3, ranked=False, suffix="-cos-q"),
)


def measures_of(results: StudyResults) -> tuple[Measure, ...]:
    """Measures of a study's tables: cosines of a stability study; else accuracy, held-out loss and what was forgotten,
    each where records have it."""
    if not results.study.kind.trains:
        return COSINES
    records = [run.record for run in results.runs if run.record is not None]
    has_accuracy = not records or any(record.has("accuracy") for record in records)
    further = (FORGOTTEN,) if any(record.has("forgotten") for record in records) else ()
    return ((ACCURACY, LOSS) if has_accuracy else (LOSS,)) + further
