"""Which rows a run got right, for records older than the key that says so: from the predictions beside them."""

from __future__ import annotations

import json
from pathlib import Path

from frozencore.lab.run.record import RunRecord, TunedRecord


def with_answers(record: RunRecord, predictions: Path) -> RunRecord:
    """The record with ``score.correct``; as it came where it has that, or where nothing whole lies there."""
    if not isinstance(record, TunedRecord) or record.score is None or record.score.correct is not None:
        return record
    try:
        rows = [json.loads(line)["correct"] for line in predictions.read_text(encoding="utf-8").splitlines()]
        correct = "".join({True: "1", False: "0"}[row] for row in rows)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # `frozencore doctor` says what is wrong
        return record
    if not correct:
        return record
    return record.model_copy(update={"score": record.score.model_copy(update={"correct": correct})})
