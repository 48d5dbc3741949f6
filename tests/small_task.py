"""A task of a few sums as its user writes it: a YAML file and the rows beside it."""

from __future__ import annotations

import json
from pathlib import Path

TASK = """
name: sums
scoring: exact_match
train: train.jsonl
evaluation: evaluation.jsonl
prompt: "{count} {things} and one more make"
answer: sum
max_new_tokens: 8
"""


def write_task(folder: Path, *, num_train: int, num_evaluation: int = 3) -> str:
    """The YAML file's path; training rows are of cats, evaluation rows of dogs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, things, count in (("train", "cats", num_train), ("evaluation", "dogs", num_evaluation)):
        rows = ({"count": i, "things": things, "sum": i + 1} for i in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(TASK)
    return str(folder / "sums.yaml")
