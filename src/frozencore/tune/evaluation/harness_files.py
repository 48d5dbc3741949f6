"""Our tasks as files that lm-evaluation-harness runs, without frozencore: ``lm_eval --include_path DIR``.

    DIR/svamp.yaml            task frozencore_svamp
    DIR/svamp.jsonl           the protocol's evaluation rows: prompt, gold, choices
    DIR/frozencore_tasks.py   reads the rows; the answer parser

Prompts are written out rather than as templates of the hub's columns, so that they are the same to the byte and the
rows are the same subset. Choices are stored without their leading space: the harness puts its own there, and leaves it
out under a chat template, as we do.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.whole_file import require_writable, write_lines, write_text
from frozencore.tune.rows import Example
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

    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in lines])})


def exact_match(doc, results):
    """Whether the first marked number of the generated text is the gold one."""
    return {"exact_match": float(parse_answer(results[0]) == parse_answer(doc["gold"]))}
'''


class _Function(str):
    """A name that YAML shows as ``!function``."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Function, lambda dumper, name: dumper.represent_scalar("!function", str(name)))


def export_tasks(
    tasks: Sequence[Task], folder: Path, *, data_root: Path | None = None, num_evaluation: int | None = None
) -> list[str]:
    """Write the files of every task; the harness's names of what was written, in order.

    Raises:
        ArtifactError: The folder cannot be written or holds other files.
        ConfigError: A task that the harness cannot express.
        DataError: From a task's rows. Nothing is written then.
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
