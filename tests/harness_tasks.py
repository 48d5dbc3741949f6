"""Our tasks as files of lm-evaluation-harness, and its record of every row, with which the tests compare our scores.

The files contain the full prompts, not templates of the hub's columns, so that prompts and rows are exactly the same.
Choices are stored without their leading space: the harness adds its own, except under a chat template, as we do.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from frozencore.calibration.preserve import own_random_state
from frozencore.files.atomic_write import write_lines, write_text
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.tasks import Task, answers
from frozencore.tune.tasks.splits import evaluation_rows

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
    """Write the files of every task, and return the harness's task names in order."""
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


def harness_samples(model: nn.Module, encoder: PromptEncoder, task: str, folder: Path) -> list[dict[str, Any]]:
    """The harness's record of every row of a task in a folder of task files."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=model, tokenizer=encoder.tokenizer, batch_size=8, max_length=encoder.max_length, device="cpu")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with own_random_state():  # simple_evaluate seeds Python, NumPy and torch
        results = lm_eval.simple_evaluate(
            model=lm, tasks=[task], bootstrap_iters=0, task_manager=manager, apply_chat_template=encoder.is_chat
        )
    samples: list[dict[str, Any]] = results["samples"][task]
    return samples
