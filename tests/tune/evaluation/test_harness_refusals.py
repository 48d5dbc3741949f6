"""Tasks that the harness cannot express, and missing measures; the harness need not be installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore.errors import ConfigError, ModelError
from frozencore.tune.evaluation.harness import _headline, export_tasks
from frozencore.tune.rows import Example
from frozencore.tune.tasks import Scoring, Task
from frozencore.tune.tasks.described_task import FileSource


@pytest.mark.parametrize(
    ("scoring", "example", "reason"),
    [
        ("choice", ("Is it? ", "yes", ("yes", "no")), r"row evaluation-0 of 'own' is \"Is it\? \" \('yes', 'no'\)"),
        ("choice", ("Is it? ", " yes", (" yes", " no")), r"prompts without a space at the end"),
        ("choice", ("Is it?", " yes", (" yes", "no")), r"choices with one in front"),
        ("text", ("", "It is.", ()), r"'own' is plain text: it has no answers that the harness could score"),
    ],
)
def test_a_row_that_the_harness_would_read_otherwise_is_refused_and_nothing_is_written(
    scoring: Scoring, example: tuple[str, str, tuple[str, ...]], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    source = FileSource({"evaluation": tmp_path / "rows.jsonl"})
    task = Task("own", scoring, source, lambda row, row_id: Example(row_id, *example), 1, 1, 1, "none")
    with pytest.raises(ConfigError, match=reason) as error:
        export_tasks([task], tmp_path / "tasks")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "tasks").exists()


def test_the_metric_shown_is_accuracy_where_there_is_one_and_never_a_nan_or_a_standard_error() -> None:
    nan = float("nan")
    assert _headline({"alias": "a", "bleu,none": 0.1, "acc_stderr,none": 0.2, "acc,none": 0.5}) == "acc,none"
    assert _headline({"acc,none": nan, "bleu,none": 0.1}) == "bleu,none"
    with pytest.raises(ModelError, match="no metric that is a number: .*Check the model's weights"):
        _headline({"alias": "a", "perplexity,none": nan, "perplexity_stderr,none": 0.1})
