"""Scores of one base model, or of several adapters on it, over many tasks; a finished task is not scored again.

    OUT/<subject>/<task>/predictions.jsonl    what was said about every evaluation row
    OUT/<subject>/<task>/result.json          its score, written last: a task without it is scored again
    OUT/result.json                           all of them
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from frozencore.errors import ArtifactError, ConfigError, DataError
from frozencore.fingerprint import fingerprint_model, fingerprint_options
from frozencore.lab.adapters import AdapterStand, adapter_names
from frozencore.lab.loading import load_model
from frozencore.lab.prompts import PromptEncoder, PromptStyle, context_limit
from frozencore.lab.record import provenance, require_writable, write_json, write_lines
from frozencore.lab.run import Stages
from frozencore.lab.scoring.task_score import score_task
from frozencore.lab.tasks.splits import evaluation_rows
from frozencore.lab.tasks.task import Example, Task

RECORD_FORMAT = 1
BASE = "base"


@dataclass(frozen=True)
class Evaluation:
    """What is scored on what, and how.

    Attributes:
        adapters: Folders of saved adapters; the bare model where there are none, or with ``with_base``.
        max_length: Tokens of a prompt with its answer; None is the model's context.
        num_evaluation: Rows of each task; None is the protocol's number.
    """

    model: str
    tasks: tuple[Task, ...]
    adapters: tuple[Path, ...] = ()
    with_base: bool = False
    data_root: Path | None = None
    prompt_style: PromptStyle = "auto"
    max_length: int | None = None
    truncate: bool = False
    length_normalised: bool = False
    num_evaluation: int | None = None
    dtype: str = "auto"
    device: str = "auto"


def evaluate(evaluation: Evaluation, out: Path, stages: Stages) -> dict[str, Any]:
    """Score every subject on every task and write ``out``.

    A task whose data are missing or malformed is reported under ``"failed"`` and the others go on.

    Returns:
        The record of ``out/result.json``.

    Raises:
        DataError: No task could be scored; the first one's reason.
        ArtifactError: ``out`` holds scores of something else, or an adapter does not fit.
        FrozenCoreError: From loading the model.
    """
    require_writable(out)
    names = adapter_names(list(evaluation.adapters))
    subjects: dict[str, Path | None] = dict(zip(names, evaluation.adapters, strict=True))
    if evaluation.with_base or not subjects:
        subjects = {BASE: None, **subjects}
    stages("load", 0, None, evaluation.model)
    model, tokenizer = load_model(evaluation.model, dtype=evaluation.dtype, device=evaluation.device)
    encoder = _encoder(evaluation, model, tokenizer)
    rows, failed = _read_rows(evaluation)
    stages("load", 1, 1, f"{sum(map(len, rows.values()))} rows of {len(rows)} tasks")

    base_hash = fingerprint_model(model)
    stand = AdapterStand(model)
    scores: list[dict[str, Any]] = []
    for subject, folder in subjects.items():
        worn: nn.Module | None = None
        for task in evaluation.tasks:
            if task.name not in rows:
                continue
            identity = _identity(evaluation, base_hash, folder, task, rows[task.name])
            place = out / subject / task.name
            kept = _finished(place, identity)
            if kept is None:
                worn = worn or (stand.bare() if folder is None else stand.wear(folder))
                try:
                    kept = _score(worn, encoder, evaluation, task, rows[task.name], place, stages, subject)
                except DataError as error:
                    failed[task.name] = " ".join(str(error).split())
                    del rows[task.name]
                    continue
                kept = {"subject": subject, **kept, "identity": identity}
                write_json(place / "result.json", kept)
            scores.append(kept)
    if not scores:
        raise DataError(next(iter(failed.values())))
    record = {
        "format": RECORD_FORMAT,
        "model": evaluation.model,
        "adapters": {subject: folder for subject, folder in subjects.items() if folder is not None},
        "prompt_style": "chat" if encoder.is_chat else "plain",
        "max_length": encoder.max_length,
        "length_normalised": evaluation.length_normalised,
        "scores": scores,
        "failed": failed,
        "provenance": provenance(),
    }
    write_json(out / "result.json", record)
    return record


def _encoder(evaluation: Evaluation, model: Any, tokenizer: Any) -> PromptEncoder:
    limit = context_limit(model, tokenizer)
    if evaluation.max_length is not None and evaluation.max_length > limit:
        raise ConfigError(f"--max-length {evaluation.max_length} is beyond the model's context of {limit} tokens.")
    return PromptEncoder(
        tokenizer,
        style=evaluation.prompt_style,
        max_length=evaluation.max_length or limit,
        too_long="truncate" if evaluation.truncate else "refuse",
    )


def _read_rows(evaluation: Evaluation) -> tuple[dict[str, tuple[Example, ...]], dict[str, str]]:
    rows: dict[str, tuple[Example, ...]] = {}
    failed: dict[str, str] = {}
    for task in evaluation.tasks:
        try:
            rows[task.name] = evaluation_rows(task, evaluation.data_root, num_evaluation=evaluation.num_evaluation)
        except DataError as error:
            failed[task.name] = " ".join(str(error).split())
    return rows, failed


def _score(
    model: nn.Module,
    encoder: PromptEncoder,
    evaluation: Evaluation,
    task: Task,
    examples: Sequence[Example],
    place: Path,
    stages: Stages,
    subject: str,
) -> dict[str, Any]:
    score = score_task(
        model,
        encoder,
        task,
        examples,
        length_normalised=evaluation.length_normalised,
        progress=lambda done, total, note: stages(f"{subject}: {task.name}", done, total, note),
    )
    write_lines(place / "predictions.jsonl", map(asdict, score.predictions))
    return {key: value for key, value in vars(score).items() if key != "predictions"}


def _identity(
    evaluation: Evaluation, base_hash: str, folder: Path | None, task: Task, examples: Sequence[Example]
) -> dict[str, Any]:
    """What a finished score must agree with to be kept."""
    return {
        "model": base_hash,
        "adapter": None if folder is None else _fingerprint_folder(folder),
        "rows": fingerprint_options({"rows": [asdict(example) for example in examples]}),
        "options": {
            "prompt_style": evaluation.prompt_style,
            "max_length": evaluation.max_length,
            "truncate": evaluation.truncate,
            "length_normalised": evaluation.length_normalised,
            "dtype": evaluation.dtype,
            "max_new_tokens": task.max_new_tokens,
        },
    }


def _fingerprint_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("adapter_*")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _finished(place: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    try:
        score: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if score.get("identity") != identity:
        raise ArtifactError(
            f"{place} holds the score of another model, adapter, set of rows or options. "
            f"Choose another --out, or remove that folder."
        )
    return score
