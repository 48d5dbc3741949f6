"""lm-evaluation-harness: run its tasks on a loaded model, and write our tasks as files for it.

``lm_eval --include_path DIR`` runs the files without frozencore. The files contain the full prompts, not templates of
the hub's columns, so that prompts and rows are exactly the same. Choices are stored without their leading space: the
harness adds its own, except under a chat template, as we do.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from frozencore.calibration.preserve import own_random_state
from frozencore.errors import ArtifactError, ConfigError, DataError, ModelError
from frozencore.files.whole_file import require_writable, write_lines, write_text
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.tasks import Task, answers
from frozencore.tune.tasks.splits import evaluation_rows
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


PREFIX = "frozencore_"
_MODULE = "frozencore_tasks"
_FUNCTIONS = '''

def load_rows(file, **_):
    """The rows beside this module, as the harness's ``custom_dataset``."""
    import json
    from pathlib import Path

    from datasets import Dataset, DatasetDict

    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").removesuffix("\\n").split("\\n")
    return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in lines])})


def exact_match(doc, results):
    """Whether the first marked number of the generated text is the gold one."""
    return {"exact_match": float(parse_answer(results[0]) == parse_answer(doc["gold"], gold=True))}
'''


class _Function(str):
    """A name that is written to YAML as ``!function``."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Function, lambda dumper, name: dumper.represent_scalar("!function", str(name)))


def export_tasks(
    tasks: Sequence[Task], folder: Path, *, data_root: Path | None = None, num_evaluation: int | None = None
) -> list[str]:
    """Write the files of every task, and return the harness's task names in order.

    Raises:
        ArtifactError: The folder cannot be written or holds other files.
        ConfigError: The harness cannot express a task.
        DataError: A task's rows are invalid. Nothing is written then.
    """
    require_writable(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / f"{_MODULE}.py").exists():
        raise ArtifactError(f"{folder} holds other files, and every YAML in it would be a task. Choose a new folder.")
    rows = {
        task.name: [_row(task, example) for example in evaluation_rows(task, data_root, num_evaluation=num_evaluation)]
        for task in tasks
    }
    write_text(folder / f"{_MODULE}.py", inspect.getsource(answers) + _FUNCTIONS)
    for task in tasks:
        write_lines(folder / f"{task.name}.jsonl", rows[task.name])
        text = yaml.dump(_description(task), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
        write_text(folder / f"{task.name}.yaml", text)
    return [PREFIX + task.name for task in tasks]


def _row(task: Task, example: Example) -> dict[str, Any]:
    if example.prompt != example.prompt.rstrip() or not all(c.startswith(" ") for c in example.choices):
        raise ConfigError(
            f"A task for the harness needs prompts without a space at the end and choices with one in front, "
            f"but row {example.id} of {task.name!r} is {json.dumps(example.prompt[-20:])} {example.choices}."
        )
    if task.scoring == "text":
        raise ConfigError(f"Task {task.name!r} is plain text: it has no answers that the harness could score.")
    row: dict[str, Any] = {"id": example.id, "prompt": example.prompt}
    if task.scoring == "exact_match":
        return {**row, "gold": example.completion}
    return {**row, "choices": [c[1:] for c in example.choices], "gold": example.choices.index(example.completion)}


def _description(task: Task) -> dict[str, Any]:
    head: dict[str, Any] = {
        "task": PREFIX + task.name,
        "custom_dataset": _Function(f"{_MODULE}.load_rows"),
        "dataset_kwargs": {"file": f"{task.name}.jsonl"},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "prompt",
        "doc_to_target": "gold",
    }
    if task.scoring == "exact_match":
        head |= {
            "output_type": "generate_until",
            "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": task.max_new_tokens},
            "process_results": _Function(f"{_MODULE}.exact_match"),
        }
        metrics = ["exact_match"]
    else:
        head |= {"output_type": "multiple_choice", "doc_to_choice": "choices", "target_delimiter": " "}
        metrics = ["acc", "acc_norm"]
    measured = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics]
    return {**head, "metric_list": measured, "metadata": {"version": 1.0}}
