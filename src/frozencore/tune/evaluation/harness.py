"""Run tasks of lm-evaluation-harness on a loaded model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from frozencore.calibration.preserve import own_random_state
from frozencore.errors import ConfigError, DataError, ModelError
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.words import one_line

_FIRST_METRICS = ("acc", "exact_match", "f1")


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

    with own_random_state(), _quiet():  # simple_evaluate seeds Python, NumPy and torch
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
    from importlib.metadata import version

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
    numbers = [
        name
        for name, value in metrics.items()
        if isinstance(value, float) and math.isfinite(value) and "_stderr" not in name
    ]
    if not numbers:
        raise ModelError(f"The harness gave no metric that is a number: {dict(metrics)}. Check the model's weights.")
    return next((name for first in _FIRST_METRICS for name in numbers if name.split(",")[0] == first), numbers[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's log inside."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
