"""What there is to score: a task of the suite, rows of one's own, or a task of lm-evaluation-harness."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from frozencore.errors import ConfigError, DataError
from frozencore.files.fingerprint import fingerprint_options
from frozencore.tune.evaluation.harness.run import harness_score, harness_version
from frozencore.tune.rows.own_rows import read_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row_sources import named
from frozencore.tune.scoring.completions import are_short, score_completions
from frozencore.tune.scoring.heldout import held_out_loss
from frozencore.tune.scoring.task_score import score_task
from frozencore.tune.tasks.splits import evaluation_rows
from frozencore.tune.tasks.task import Example, Task
from frozencore.words import Progress

Scored = tuple[dict[str, Any], Iterable[Mapping[str, Any]]]
"""The numbers of a score, and its predictions row by row."""


@dataclass(frozen=True)
class TaskScorer:
    """One task, ready to score a model on.

    Attributes:
        identity: What, beside the model and the common options, decides the score.
        score: Scores a model; raises ``DataError`` if the rows do not suit it.
    """

    name: str
    num_rows: int | None
    identity: Mapping[str, Any]
    score: Callable[[nn.Module, Progress], Scored]


def suite_scorers(
    tasks: Iterable[Task],
    encoder: PromptEncoder,
    *,
    data_root: Path | None,
    num_evaluation: int | None,
    length_normalised: bool,
) -> tuple[list[TaskScorer], dict[str, str]]:
    """A scorer for every task whose rows can be read, and one line of reason for every other."""
    scorers: list[TaskScorer] = []
    failed: dict[str, str] = {}
    for task in tasks:
        try:
            examples = evaluation_rows(task, data_root, num_evaluation=num_evaluation)
        except DataError as error:
            failed[task.name] = str(error)
        else:
            scorers.append(_suite_scorer(task, examples, encoder, length_normalised=length_normalised))
    return scorers, failed


def own_scorer(data: str, columns: str | None, encoder: PromptEncoder, *, num_rows: int | None) -> TaskScorer:
    """The loss on rows of one's own and, where all completions are short, how many are generated word for word.

    Args:
        num_rows: Of the first rows; all of them by default.

    Raises:
        ConfigError: ``num_rows`` is not positive.
        DataError: The rows cannot be read.
    """
    if num_rows is not None and num_rows < 1:
        raise ConfigError(f"Row counts must be positive, but {num_rows} came.")
    own = read_rows(data, encoder, columns)
    rows = encoder.training_rows(own.texts[:num_rows])
    compares = own.columns != ("text",) and are_short(rows)

    def score(model: nn.Module, progress: Progress) -> Scored:
        loss = held_out_loss(model, rows, pad_id=encoder.pad_id, progress=progress)
        if not compares:
            return {"task": name, "accuracy": None, "num_examples": len(rows), "held_out_loss": loss}, ()
        found = score_completions(model, encoder, rows, held_out_loss=loss, progress=progress)
        summary = {key: value for key, value in vars(found).items() if key != "predictions"}
        return {**summary, "task": name}, map(asdict, found.predictions)

    name = re.sub(r"[^\w.-]+", "-", named(data))  # of a folder too
    return TaskScorer(name, len(rows), {"rows": fingerprint_options({"rows": [asdict(row) for row in rows]})}, score)


def harness_scorer(name: str, encoder: PromptEncoder, *, include_path: Path | None, limit: int | None) -> TaskScorer:
    """A task of the harness; its name and data are looked up when it is scored.

    Raises:
        ConfigError: The harness is not installed.
    """

    def score(model: nn.Module, progress: Progress) -> Scored:
        progress("score", 0, 1, "lm-evaluation-harness")
        found = harness_score(model, encoder, name, include_path=include_path, limit=limit)
        progress("score", 1, 1, found.metric)
        summary = {
            "task": name,
            "accuracy": found.value,
            "standard_error": found.standard_error,
            "num_examples": len({sample["doc_id"] for sample in found.samples}),
            "metric": found.metric,
            "metrics": dict(found.metrics),
        }
        return summary, found.samples

    identity = {"harness": harness_version(), "include_path": str(include_path), "limit": limit}
    return TaskScorer(name, None, identity, score)


def _suite_scorer(
    task: Task, examples: tuple[Example, ...], encoder: PromptEncoder, *, length_normalised: bool
) -> TaskScorer:
    def score(model: nn.Module, progress: Progress) -> Scored:
        found = score_task(model, encoder, task, examples, length_normalised=length_normalised, progress=progress)
        summary = {key: value for key, value in vars(found).items() if key != "predictions"}
        return summary, map(asdict, found.predictions)

    identity = {
        "rows": fingerprint_options({"rows": [asdict(example) for example in examples]}),
        "max_new_tokens": task.max_new_tokens,
        "length_normalised": length_normalised,
    }
    return TaskScorer(task.name, len(examples), identity, score)
