"""The score of SmolLM2 on ARC-Challenge, beside the published one: is it the model that it says?

    OMP_NUM_THREADS=1 nice -n 5 python benchmarks/smollm2_scores.py --data-root DIR     # minutes; --quick: 16 rows

All 1,172 test rows, without examples, in the prompts of lm-evaluation-harness. A choice is scored by its log-likelihood
(the harness's ``acc``), and by its log-likelihood per character (``acc_norm``, which is the published score).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.run.models import load_model
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import evaluation_rows
from harness import parser_of, table, write_found

NAMES = {"arc_challenge": "ARC-Challenge"}
ARC_CHALLENGE_ROWS = 1172
PUBLISHED_ARC_CHALLENGE = 0.2773
"""``acc_norm`` of the unquantised model, as the card of lldois/SmolLM2-135M-Reasoning-SLERP-Champion gives it."""


def without_options(example: Example) -> Example:
    """The row of ARC as lm-evaluation-harness asks it: the question, without the list of options in the prompt."""
    question, _, _ = example.prompt.partition("\nOptions:\n")
    return replace(example, prompt=f"{question}\nAnswer:")


def accuracies(model: Any, tokenizer: Any, rows: Sequence[Example]) -> tuple[float, float]:
    """Accuracy by summed log-likelihood, and by log-likelihood per character."""
    found = predict_choices(model, PromptEncoder(tokenizer, max_length=2048), rows)
    by_length = 0
    for row, prediction in zip(rows, found, strict=True):
        rates = [value / len(choice[1:]) for value, choice in zip(prediction.logprobs, row.choices, strict=True)]
        by_length += row.choices[rates.index(max(rates))] == row.completion
    return sum(prediction.correct for prediction in found) / len(rows), by_length / len(rows)


def standard_error(accuracy: float, num_rows: int) -> float:
    return math.sqrt(accuracy * (1 - accuracy) / num_rows)


def block(found: Mapping[str, Any]) -> str:
    """The score as a table of docs/smollm2.md, in percent."""
    cells = [
        f"{found['num_rows']:,}",
        *(f"{100 * found[name]:.1f}" for name in ("accuracy", "accuracy_per_character")),
        f"{100 * standard_error(found['accuracy_per_character'], found['num_rows']):.1f}",
        f"{100 * found['published_per_character']:.1f}",
    ]
    headings = ("task", "rows", "accuracy, %", "per character, %", "its standard error", "published, per character, %")
    return table(headings, [[NAMES.get(found["task"], found["task"]), *cells]])


def main() -> None:
    parser = parser_of(__doc__, "smollm2-scores")
    parser.add_argument("--model", default="smollm2", help="Another model folder.")
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    name, task, num_rows = (
        ("pocket", "pocket-sentiment", 16) if options.quick else (options.model, "arc_challenge", ARC_CHALLENGE_ROWS)
    )
    rows = evaluation_rows(find_task(task), options.data_root, num_evaluation=num_rows)
    model, tokenizer = load_model(name, device="cpu")
    accuracy, by_length = accuracies(model, tokenizer, [without_options(row) for row in rows])
    found = {
        "model": name,
        "task": task,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_rows": len(rows),
        "accuracy": accuracy,
        "accuracy_per_character": by_length,
        "published_per_character": PUBLISHED_ARC_CHALLENGE,
    }
    print(block(found))
    write_found(options, **found)


if __name__ == "__main__":
    main()
