"""The table of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.cli.tables import percent

COUNTS = {"num_truncated": "truncated", "num_unanswered": "no answer", "num_ties": "ties"}
RARE_COUNTS = {"num_duplicate_choices": "duplicates", "num_cut": "cut prompts"}  # shown where there is one


def evaluation_table(record: Mapping[str, Any]) -> Group:
    """Every score of every subject, their means, and why a task has none."""
    table = Table(title=f"Evaluation of {record['model']}", title_justify="left")
    rare = {key: title for key, title in RARE_COUNTS.items() if any(score.get(key) for score in record["scores"])}
    counts = COUNTS | rare
    for heading in (
        "subject", "task", "rows", "accuracy %", "± se", "chance", "majority", *counts.values(), "nats/token",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("subject", "task") else "right")
    for subject in dict.fromkeys(score["subject"] for score in record["scores"]):
        scores = [score for score in record["scores"] if score["subject"] == subject]
        for i, score in enumerate(scores):
            table.add_row(subject if i == 0 else "", *_cells(score, counts), end_section=i == len(scores) - 1)
    return Group(table, *_means(record["scores"]), *_notes(record))


def _cells(score: Mapping[str, Any], counts: Mapping[str, str]) -> list[str]:
    shares = [score.get("standard_error"), score.get("chance"), score.get("majority_class")]
    loss = score.get("held_out_loss")
    return [
        score["task"],
        str(score["num_examples"]),
        *("" if share is None else percent(share) for share in (score["accuracy"], *shares)),
        *(str(score.get(count, "")) for count in counts),
        "" if loss is None else f"{loss:.3f}",
    ]


def _means(scores: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Unweighted means, where every subject has the same two tasks or more."""
    by_subject: dict[str, dict[str, float]] = {}
    for score in scores:
        if score["accuracy"] is not None:
            by_subject.setdefault(score["subject"], {})[score["task"]] = score["accuracy"]
    tasks = [set(own) for own in by_subject.values()]
    if not tasks or len(tasks[0]) < 2 or any(own != tasks[0] for own in tasks):
        return []
    return [
        Text(f"{subject}: mean of {len(own)} tasks {percent(sum(own.values()) / len(own))} %")
        for subject, own in by_subject.items()
    ]


def _notes(record: Mapping[str, Any]) -> list[Text]:
    metrics = {score["task"]: score["metric"] for score in record["scores"] if "metric" in score}
    return [
        *(Text(f"{task}: the harness's {metric}") for task, metric in metrics.items()),
        *(Text(f"{task} was not scored: {reason}") for task, reason in record["failed"].items()),
    ]
