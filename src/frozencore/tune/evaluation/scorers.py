"""Scorers of a task of the suite, of the user's own rows, and of a task of lm-evaluation-harness."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from frozencore.errors import ConfigError
from frozencore.files.fingerprint import fingerprint_options
from frozencore.tune.evaluation.harness import harness_score, harness_version
from frozencore.tune.rows.own_rows import read_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row_sources import named
from frozencore.tune.run.prepare import require_embedded
from frozencore.tune.run.record_parts import ReadRows
from frozencore.tune.scoring import TaskScore
from frozencore.tune.scoring.exact_match import are_short
from frozencore.tune.scoring.score import held_out_loss, score_completions, score_task
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.splits import evaluation_rows
from frozencore.words import Progress, with_note

Scored = tuple[dict[str, Any], Iterable[Mapping[str, Any]]]
"""The numbers of a score, and the predictions by row."""


@dataclass(frozen=True)
class TaskScorer:
    """One task, ready to score a model on.

    Attributes:
        identity: The inputs of the score beside the model and the common options.
        score: Scores a model; raises ``DataError`` if the rows do not suit it.
        reading: A summary of reading own rows.
    """

    name: str
    identity: Mapping[str, Any]
    score: Callable[[nn.Module, Progress], Scored]
    reading: ReadRows | None = None


def suite_scorer(
    task: Task, encoder: PromptEncoder, *, data_root: Path | None, num_rows: int | None, length_normalised: bool
) -> TaskScorer:
    """Make a scorer of a task of the suite; raises ``DataError`` if its rows cannot be read."""
    examples = evaluation_rows(task, data_root, num_evaluation=num_rows)

    def score(model: nn.Module, progress: Progress) -> Scored:
        return _scored(
            score_task(model, encoder, task, examples, length_normalised=length_normalised, progress=progress)
        )

    identity = {
        "rows": fingerprint_options({"rows": [asdict(example) for example in examples]}),
        "max_new_tokens": task.max_new_tokens,
        "length_normalised": length_normalised,
    }
    return TaskScorer(task.name, identity, score)


def own_scorer(
    data: str, columns: str | None, encoder: PromptEncoder, model: nn.Module, *, num_rows: int | None
) -> TaskScorer:
    """Score the loss on the user's own rows, and, if all completions are short, the share that is exactly right.

    Args:
        num_rows: Score only the first rows; all by default.

    Raises:
        ConfigError: ``num_rows`` is not positive.
        DataError: The rows cannot be read.
        ModelError: A row holds a token that the model has no embedding of.
    """
    if num_rows is not None and num_rows < 1:
        raise ConfigError(f"Row counts must be positive, but {num_rows} came.")
    own = read_rows(data, encoder, columns)
    texts = own.texts[:num_rows]
    rows = encoder.training_rows(texts)
    require_embedded(model, encoder.tokenizer, rows)
    num_beyond = len(own.texts) - len(texts)
    reading = ReadRows(
        read=own.num_read,
        columns=own.columns,
        left_out={"beyond --num-evaluation": num_beyond} if num_beyond else {},
        unused_columns=own.unused,
        changed=Counter(what for text in texts for what in text.changed),
    )
    compares = own.columns != ("text",) and are_short(rows)
    name = re.sub(r"[^\w.-]+", "-", named(data))  # becomes a folder's name

    def score(model: nn.Module, progress: Progress) -> Scored:
        loss = held_out_loss(model, rows, pad_id=encoder.pad_id, progress=with_note(progress, "loss"))
        if not compares:
            return {"task": name, "accuracy": None, "num_examples": len(rows), "held_out_loss": loss}, ()
        told = with_note(progress, "completions")
        summary, predictions = _scored(score_completions(model, encoder, rows, held_out_loss=loss, progress=told))
        return {**summary, "task": name}, predictions

    return TaskScorer(name, {"rows": fingerprint_options({"rows": [asdict(row) for row in rows]})}, score, reading)


def harness_scorer(name: str, encoder: PromptEncoder, *, include_path: Path | None, limit: int | None) -> TaskScorer:
    """Make a scorer of a task of the harness; its name and data are checked when it is scored.

    Raises:
        ConfigError: The harness is not installed.
    """

    def score(model: nn.Module, progress: Progress) -> Scored:
        progress("score", 0, 1, "lm-evaluation-harness")
        found, samples = harness_score(model, encoder, name, include_path=include_path, limit=limit)
        progress("score", 1, 1, found["metric"])
        return found, samples

    identity: dict[str, Any] = {"harness": harness_version(), "include_path": str(include_path), "limit": limit}
    if include_path is not None:
        identity["files"] = _fingerprint_files(include_path)
    return TaskScorer(name, identity, score)


def _fingerprint_files(folder: Path) -> str:
    """SHA-256 of the names and the content of all files below a folder, without Python's caches."""
    files = {
        str(file.relative_to(folder)): sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }
    return fingerprint_options(files)


def _scored(found: TaskScore) -> Scored:
    summary = {key: value for key, value in vars(found).items() if key not in ("predictions", "row_losses")}
    return summary, map(asdict, found.predictions)
