"""Score one base model, or several adapters on it, over many tasks; a finished task is not scored again.

OUT/<subject>/<task>/predictions.jsonl    the prediction for every evaluation row
OUT/<subject>/<task>/result.json          the score, written last: a task without it is scored again
OUT/result.json                           all scores

A subject is an adapter by a short name, or ``base``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from frozencore.errors import ArtifactError, ConfigError, DataError
from frozencore.files.fingerprint import fingerprint_model
from frozencore.files.whole_file import require_writable, write_json, write_lines
from frozencore.tune.evaluation.adapters import BASE, BaseWithAdapter, adapter_names
from frozencore.tune.evaluation.scorers import TaskScorer, harness_scorer, own_scorer, suite_scorer
from frozencore.tune.rows.prompts import PROMPT_DATE, PromptEncoder, PromptStyle, asks_for_today, context_limit
from frozencore.tune.run.models import load_model
from frozencore.tune.run.provenance import provenance
from frozencore.tune.run.run_folder import PREDICTIONS, RECORD
from frozencore.tune.tasks import Task
from frozencore.words import Progress, as_stage, num_of

RECORD_FORMAT = 1


@dataclass(frozen=True)
class Evaluation:
    """The model, adapters, tasks and options of an evaluation.

    Attributes:
        data: The user's own rows, as for ``frozencore tune --data``; ``columns`` names their columns.
        harness_tasks: Names of tasks of lm-evaluation-harness, or of the task files in ``include_path``.
        adapters: Folders of saved adapters. Without any, or with ``with_base``, the base model is scored.
        prompt_date: The date for a chat template that asks for it.
        max_length: The most tokens of a prompt with its answer; None is the model's context.
        num_evaluation: Rows of each task; None is the task's default.
    """

    model: str
    tasks: tuple[Task, ...] = ()
    data: str | None = None
    columns: str | None = None
    harness_tasks: tuple[str, ...] = ()
    include_path: Path | None = None
    adapters: tuple[Path, ...] = ()
    with_base: bool = False
    data_root: Path | None = None
    prompt_style: PromptStyle = "auto"
    prompt_date: date = PROMPT_DATE
    max_length: int | None = None
    truncate: bool = False
    length_normalised: bool = False
    num_evaluation: int | None = None
    dtype: str = "auto"
    device: str = "auto"


def evaluate(evaluation: Evaluation, out: Path, progress: Progress) -> dict[str, Any]:
    """Score every subject on every task and write ``out``.

    A task whose data are missing, malformed or too long is reported under ``"failed"``; the other tasks continue.

    Returns:
        The record of ``out/result.json``.

    Raises:
        DataError: No task could be scored; the message is the first reason.
        ArtifactError: ``out`` holds scores of something else, or an adapter does not fit.
        FrozenCoreError: The model cannot be loaded.
    """
    require_writable(out)
    subjects = _subjects(evaluation)
    progress("load", 0, None, evaluation.model)
    model, tokenizer = load_model(evaluation.model, dtype=evaluation.dtype, device=evaluation.device)
    encoder = _encoder(evaluation, model, tokenizer)
    scorers, failed = _scorers(evaluation, encoder, model)
    readings = {scorer.name: scorer.reading for scorer in scorers if scorer.reading is not None}
    said = [line for reading in readings.values() for line in reading.not_as_given]
    progress("load", 1, 1, ", ".join([num_of(len(scorers), "task"), *said]))

    common = {
        "model": fingerprint_model(model),
        "dtype": str(model.dtype),
        "prompt_style": "chat" if encoder.is_chat else "plain",
        "max_length": encoder.max_length,
        "truncate": evaluation.truncate,
    }
    if encoder.is_chat and asks_for_today(tokenizer):
        common["prompt_date"] = evaluation.prompt_date.isoformat()
    base = BaseWithAdapter(model)
    scores: list[dict[str, Any]] = []
    for subject, folder in subjects.items():
        identity = {**common, "adapter": None if folder is None else _fingerprint_folder(folder)}
        found, reasons = _score_subject(subject, folder, base, scorers, identity, out, progress)
        scores += found
        failed |= reasons
    if not scores:
        raise DataError(next(iter(failed.values())))
    record = {
        "format": RECORD_FORMAT,
        **common,
        "model": evaluation.model,
        "adapters": {subject: folder for subject, folder in subjects.items() if folder is not None},
        "length_normalised": evaluation.length_normalised,
        "scores": scores,
        **({"reading": {name: reading.content() for name, reading in readings.items()}} if readings else {}),
        "failed": failed,
        "hashes": {"model": common["model"]},
        "provenance": provenance(next(model.parameters()).device),
    }
    write_json(out / RECORD, record)
    return record


def _subjects(evaluation: Evaluation) -> dict[str, Path | None]:
    names = adapter_names(list(evaluation.adapters))
    subjects: dict[str, Path | None] = dict(zip(names, evaluation.adapters, strict=True))
    return {BASE: None, **subjects} if evaluation.with_base or not subjects else subjects


def _encoder(evaluation: Evaluation, model: Any, tokenizer: Any) -> PromptEncoder:
    limit = context_limit(model, tokenizer)
    if evaluation.max_length is not None and evaluation.max_length > limit:
        raise ConfigError(f"--max-length {evaluation.max_length} is beyond the model's context of {limit} tokens.")
    return PromptEncoder(
        tokenizer,
        style=evaluation.prompt_style,
        today=evaluation.prompt_date,
        max_length=evaluation.max_length or limit,
        too_long="truncate" if evaluation.truncate else "refuse",
    )


def _scorers(evaluation: Evaluation, encoder: PromptEncoder, model: Any) -> tuple[list[TaskScorer], dict[str, str]]:
    """Make a scorer for every task whose rows can be read, and a one-line reason for every other task."""
    num_rows, scorers, failed = evaluation.num_evaluation, [], {}
    for task in evaluation.tasks:
        options: dict[str, Any] = {"data_root": evaluation.data_root, "length_normalised": evaluation.length_normalised}
        try:
            scorers.append(suite_scorer(task, encoder, num_rows=num_rows, **options))
        except DataError as error:
            failed[task.name] = str(error)
    if evaluation.data is not None:
        scorers.append(own_scorer(evaluation.data, evaluation.columns, encoder, model, num_rows=num_rows))
    for name in evaluation.harness_tasks:
        scorers.append(harness_scorer(name, encoder, include_path=evaluation.include_path, limit=num_rows))
    return scorers, failed


def _score_subject(
    subject: str,
    folder: Path | None,
    base: BaseWithAdapter,
    scorers: list[TaskScorer],
    identity: dict[str, Any],
    out: Path,
    progress: Progress,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Score one adapter, and give the reasons for missing scores; it is loaded only if a task is left."""
    scores: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    model = None
    for scorer in scorers:
        place = out / subject / scorer.name
        wanted = {**identity, **scorer.identity}
        score = _finished(place, wanted)
        if score is None:
            if model is None:
                model = base.with_adapter(folder)
            try:
                summary, predictions = scorer.score(model, as_stage(progress, f"{subject}: {scorer.name}"))
            except DataError as error:
                failed[scorer.name] = str(error)
                continue
            write_lines(place / PREDICTIONS, predictions)
            score = {"subject": subject, **summary, "identity": wanted}
            write_json(place / RECORD, score)
        scores.append(score)
    return scores, failed


def _fingerprint_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("adapter_*")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _finished(place: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The finished score in a folder, or None."""
    try:
        score: dict[str, Any] = json.loads((place / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(score, dict):
        return None
    if score.get("identity") != identity:
        raise ArtifactError(
            f"{place} holds the score of another model, adapter, set of rows or options. "
            f"Choose another --out, or remove that folder."
        )
    return score
