"""Score one base model, or several adapters on it, over many tasks; a finished task is not scored again.

OUT/<subject>/<task>/predictions.jsonl    the prediction for every evaluation row
OUT/<subject>/<task>/result.json          the score, written last: a task without it is scored again
OUT/result.json                           all scores

A subject is an adapter by a short name, or ``base``. The base model is loaded once and not changed."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, PeftModelForCausalLM
from torch import nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.saved.state import UncalibratedWarning, read_folder
from frozencore.calibration.preserve import own_random_state
from frozencore.errors import ArtifactError, ConfigError, DataError, ModelError
from frozencore.files.fingerprint import fingerprint_model, fingerprint_options
from frozencore.files.whole_file import require_writable, write_json, write_lines
from frozencore.text import Progress, as_stage, num_of, one_line, with_note
from frozencore.tune.folder import PREDICTIONS, RECORD
from frozencore.tune.load import load_model, require_embedded
from frozencore.tune.provenance import provenance
from frozencore.tune.record import ReadRows
from frozencore.tune.rows.own_rows import read_rows
from frozencore.tune.rows.prompts import PROMPT_DATE, PromptEncoder, PromptStyle, asks_for_today, context_limit
from frozencore.tune.rows.row_sources import named
from frozencore.tune.scoring.exact_match import are_short
from frozencore.tune.scoring.forward import unload_adapter
from frozencore.tune.scoring.score import TaskScore, held_out_loss, score_completions, score_task
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.splits import evaluation_rows

BASE = "base"


class BaseWithAdapter:
    """A base model with at most one adapter at a time: frozen cores, LoRA, or another PEFT method."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self._adapted: PeftModel | None = None

    def without_adapter(self) -> nn.Module:
        if self._adapted is not None:
            self.base, self._adapted = unload_adapter(self._adapted), None
        return self.base

    def with_adapter(self, folder: Path | None) -> nn.Module:
        """The base model with the adapter saved in a folder, in evaluation mode; None gives the base model alone.

        Raises:
            ArtifactError: There is no adapter, it is damaged or a pickle, or it does not fit this base.
        """
        if folder is None:
            return self.without_adapter()
        read_folder(folder)  # refuses a damaged folder and a pickle
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # missing tensors raise an error below
                warnings.simplefilter("always", UncalibratedWarning)
                base = self.without_adapter()
                config = PeftConfig.from_pretrained(str(folder))
                if isinstance(config, FrozenCoreConfig):  # a local frozen core is checked as a whole first
                    config = FrozenCoreConfig.from_pretrained(str(folder))
                config.inference_mode = True
                if config.is_prompt_learning:  # it shifts every position
                    raise ArtifactError(
                        f"--adapter {folder} holds virtual tokens ({config.peft_type}), which are not scored here. "
                        "Give an adapter that changes layers."
                    )
                self._adapted = PeftModelForCausalLM(base, config)
                found = self._adapted.load_adapter(str(folder), adapter_name="default")
        except ArtifactError:
            raise
        except Exception as error:  # PEFT and safetensors raise many kinds of errors for a folder that does not fit
            reason = one_line(error, 200)
            raise ArtifactError(f"--adapter {folder} does not go on this base model: {reason}") from error
        odd = [*found.missing_keys, *found.unexpected_keys]
        if odd:
            raise ArtifactError(
                f"--adapter {folder} must fit this base model tensor by tensor, but {len(found.missing_keys)} tensors "
                f"are missing and {len(found.unexpected_keys)} have no layer, for instance {odd[0]}. "
                f"Give the base model that it was trained on."
            )
        return self._adapted.eval()


def adapter_names(folders: list[Path]) -> list[str]:
    """A short unique name for each adapter folder, from the last parts of its path.

    ``runs/a/adapter`` and ``runs/b/adapter`` become ``a`` and ``b``. No name equals the base model's.

    Raises:
        ArtifactError: A folder comes twice, or two differ only in upper and lower case.
    """
    whole = [Path(os.path.abspath(folder)).parts for folder in folders]  # resolves `..` but not links
    parts = [[part for part in own if part != "adapter"] or ["adapter"] for own in whole]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["-".join(own[-length:]).strip("/") for own in parts]
        if len({BASE, *map(str.casefold, names)}) == len(names) + 1:  # some file systems ignore case
            return names
    if not folders:
        return []
    raise ArtifactError("Two --adapter options name the same folder, or differ in case only. Give each once.")


def harness_score(
    model: nn.Module, encoder: PromptEncoder, task: str, *, include_path: Path | None = None, limit: int | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run one task of the harness with the harness's own code; the global random states are restored.

    The accuracy of the score is accuracy, exact match or F1 if the task has it, else its first metric.

    Args:
        include_path: A folder of task files; the task is searched only there.

    Returns:
        The numbers of the score, with all metrics under the harness's own names, and its record of every row.

    Raises:
        ConfigError: The harness is not installed, or has no such task.
        DataError: The task's data cannot be loaded.
    """
    lm_eval = _import_harness()
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with own_random_state(), ExitStack() as restored:  # simple_evaluate seeds Python, NumPy and torch
        logger = logging.getLogger("lm_eval")
        restored.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        manager = TaskManager(include_path=include_path and str(include_path), include_defaults=include_path is None)
        if task not in manager.all_tasks:
            place = f"in {include_path}" if include_path else "in lm-evaluation-harness"
            raise ConfigError(f"There is no task {task!r} {place}. `lm_eval ls tasks` lists the harness's own.")
        lm = HFLM(
            pretrained=model,
            tokenizer=encoder.tokenizer,
            batch_size=8,
            max_length=encoder.max_length,
            device=str(next(model.parameters()).device),
        )
        try:
            results = lm_eval.simple_evaluate(
                model=lm,
                tasks=[task],
                limit=limit,
                bootstrap_iters=0,
                task_manager=manager,
                apply_chat_template=encoder.is_chat,
            )
        except (OSError, ValueError, KeyError, AssertionError) as error:
            raise DataError(f"The harness could not run {task!r}: {one_line(error, 200)}") from error
    metrics = results["results"].get(task) or results["groups"][task]
    metric = _headline(metrics)
    error_of = metrics.get(metric.replace(",", "_stderr,"))
    samples = [sample for samples in results["samples"].values() for sample in samples]
    score = {
        "task": task,
        "accuracy": float(metrics[metric]),
        "standard_error": error_of if isinstance(error_of, float) else None,
        "num_examples": sum(len({row["doc_id"] for row in of_task}) for of_task in results["samples"].values()),
        "metric": metric,
        "metrics": dict(metrics),
    }
    return score, samples


def harness_version() -> str:
    """The version of the installed harness; a ``ConfigError`` if it is not installed."""
    _import_harness()
    return version("lm_eval")


def _import_harness() -> Any:
    try:
        import lm_eval
    except ImportError as error:
        raise ConfigError(
            "Tasks of lm-evaluation-harness need it installed, and it is not: pip install 'frozencore[lm-eval]'."
        ) from error
    return lm_eval


def _headline(metrics: Mapping[str, Any]) -> str:
    values = {name: value for name, value in metrics.items() if isinstance(value, float) and "_stderr" not in name}
    numbers = [name for name, value in values.items() if math.isfinite(value)]
    if not numbers:
        raise ModelError(f"The harness gave no metric that is a number: {dict(metrics)}. Check the model's weights.")
    return next(
        (name for first in ("acc", "exact_match", "f1") for name in numbers if name.split(",")[0] == first), numbers[0]
    )


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
    names = adapter_names(list(evaluation.adapters))
    subjects: dict[str, Path | None] = dict(zip(names, evaluation.adapters, strict=True))
    if evaluation.with_base or not subjects:
        subjects = {BASE: None, **subjects}
    progress("load", 0, None, evaluation.model)
    model, tokenizer = load_model(evaluation.model, dtype=evaluation.dtype, device=evaluation.device)
    limit = context_limit(model, tokenizer)
    if evaluation.max_length is not None and evaluation.max_length > limit:
        raise ConfigError(f"--max-length {evaluation.max_length} is beyond the model's context of {limit} tokens.")
    encoder = PromptEncoder(
        tokenizer,
        style=evaluation.prompt_style,
        today=evaluation.prompt_date,
        max_length=evaluation.max_length or limit,
        too_long="truncate" if evaluation.truncate else "refuse",
    )
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
        identity = {**common, "adapter": None if folder is None else _hash_of(folder)}
        found, reasons = _score_subject(subject, folder, base, scorers, identity, out, progress)
        scores += found
        failed |= reasons
    if not scores:
        raise DataError(next(iter(failed.values())))
    record = {
        "format": 1,
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


def _scorers(evaluation: Evaluation, encoder: PromptEncoder, model: Any) -> tuple[list[TaskScorer], dict[str, str]]:
    """Make a scorer for every task whose rows can be read, and a one-line reason for every other task."""
    scorers, failed = [], {}
    for task in evaluation.tasks:
        try:
            scorers.append(_suite_scorer(task, encoder, evaluation))
        except DataError as error:
            failed[task.name] = str(error)
    if evaluation.data is not None:
        scorers.append(_own_scorer(evaluation.data, encoder, model, evaluation))
    scorers += [_harness_scorer(name, encoder, evaluation) for name in evaluation.harness_tasks]
    return scorers, failed


def _hash_of(adapter: Path) -> str:
    """SHA-256 of an adapter's configuration and weights."""
    digest = hashlib.sha256()
    for path in sorted(adapter.glob("adapter_*")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


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


def _finished(place: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The finished score in a folder, or None."""
    try:
        score: dict[str, Any] = json.loads((place / RECORD).read_text(encoding="utf-8"))
        of_score = score.get("identity")
    except (OSError, ValueError, RecursionError, AttributeError):  # half written, or no object
        return None
    if of_score != identity:
        raise ArtifactError(
            f"{place} holds the score of another model, adapter, set of rows or options. "
            f"Choose another --out, or remove that folder."
        )
    return score


ScoreAndPredictions = tuple[dict[str, Any], Iterable[Mapping[str, Any]]]
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
    score: Callable[[nn.Module, Progress], ScoreAndPredictions]
    reading: ReadRows | None = None


def _suite_scorer(task: Task, encoder: PromptEncoder, evaluation: Evaluation) -> TaskScorer:
    """Make a scorer of a task of the suite; raises ``DataError`` if its rows cannot be read."""
    examples = evaluation_rows(task, evaluation.data_root, num_evaluation=evaluation.num_evaluation)
    options = {"length_normalised": evaluation.length_normalised}

    def score(model: nn.Module, progress: Progress) -> ScoreAndPredictions:
        return _scored(score_task(model, encoder, task, examples, **options, progress=progress))

    hashed = fingerprint_options({"rows": list(map(asdict, examples))})
    identity = {"rows": hashed, "max_new_tokens": task.max_new_tokens, **options}
    return TaskScorer(task.name, identity, score)


def _own_scorer(data: str, encoder: PromptEncoder, model: nn.Module, evaluation: Evaluation) -> TaskScorer:
    """Score the loss on the user's own rows, and, if all completions are short, the share that is exactly right."""
    num_rows = evaluation.num_evaluation
    if num_rows is not None and num_rows < 1:
        raise ConfigError(f"Row counts must be positive, but {num_rows} came.")
    own = read_rows(data, encoder, evaluation.columns)
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
        joined=sum(bool(row.joined) for row in rows) or None,
    )
    compares = own.columns != ("text",) and are_short(rows)
    name = re.sub(r"[^\w.-]+", "-", named(data))  # becomes a folder's name

    def score(model: nn.Module, progress: Progress) -> ScoreAndPredictions:
        loss = held_out_loss(model, rows, pad_id=encoder.pad_id, progress=with_note(progress, "loss"))
        if not compares:
            return {"task": name, "accuracy": None, "num_examples": len(rows), "held_out_loss": loss}, ()
        progress = with_note(progress, "completions")
        summary, predictions = _scored(score_completions(model, encoder, rows, held_out_loss=loss, progress=progress))
        return {**summary, "task": name}, predictions

    return TaskScorer(name, {"rows": fingerprint_options({"rows": [row.content for row in rows]})}, score, reading)


def _harness_scorer(name: str, encoder: PromptEncoder, evaluation: Evaluation) -> TaskScorer:
    """Make a scorer of a task of the harness; its name and data are checked when it is scored."""
    folder, limit = evaluation.include_path, evaluation.num_evaluation

    def score(model: nn.Module, progress: Progress) -> ScoreAndPredictions:
        progress("score", 0, 1, "lm-evaluation-harness")
        found, samples = harness_score(model, encoder, name, include_path=folder, limit=limit)
        progress("score", 1, 1, found["metric"])
        return found, samples

    identity: dict[str, Any] = {"harness": harness_version(), "include_path": str(folder), "limit": limit}
    if folder is not None:
        files = (file for file in sorted(folder.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)
        content = {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        identity["files"] = fingerprint_options(content)
    return TaskScorer(name, identity, score)


def _scored(found: TaskScore) -> ScoreAndPredictions:
    summary = {key: value for key, value in vars(found).items() if key not in ("predictions", "row_losses")}
    return summary, map(asdict, found.predictions)
