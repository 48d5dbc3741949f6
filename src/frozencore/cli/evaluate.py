"""``frozencore evaluate``: score a model, or several adapters on it, and print a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.cli.display import console
from frozencore.cli.flags import flag, told_if_nothing_is_kept
from frozencore.errors import ConfigError
from frozencore.files.adapter_folder import adapter_in
from frozencore.files.whole_file import require_writable
from frozencore.tune.folder import RECORD
from frozencore.tune.rows.prompts import PROMPT_DATE, PromptStyle
from frozencore.tune.rows.row_sources import require_source, sources_of

COUNTS = {"num_truncated": "truncated", "num_unanswered": "no answer", "num_ties": "ties"}
RARE_COUNTS = {"num_duplicate_choices": "duplicates", "num_cut": "cut prompts"}  # shown if not zero


def evaluate(
    model: Annotated[str, flag("model")],
    output: Annotated[Path, typer.Option("--out", "--output", help="Folder of the scores; finished scores are kept.")],
    task: Annotated[
        str | None, typer.Option(help="all (the paper's eleven), task names, or your own YAML files; comma-separated.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Your own rows, as for `tune --data`: scores the loss, and counts correct short completions."
        ),
    ] = None,
    columns: Annotated[str | None, flag("columns")] = None,
    lm_eval: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness by name (needs frozencore[lm-eval]).")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder of task files for --lm-eval.")] = None,
    adapter: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a run, or of an adapter (cores, LoRA); may be repeated."),
    ] = None,
    with_base: Annotated[bool, typer.Option("--with-base", help="Score the model without adapters too.")] = False,
    data_root: Annotated[Path | None, flag("data_root")] = None,
    num_evaluation: Annotated[int | None, flag("num_evaluation", "Rows of a task. Default: the protocol's.")] = None,
    length_normalised: Annotated[
        bool, typer.Option("--length-normalised", help="Compare choices by log-likelihood per character.")
    ] = False,
    prompt_style: Annotated[str, flag("prompt_style")] = "auto",
    prompt_date: Annotated[str, flag("prompt_date")] = str(PROMPT_DATE),
    max_length: Annotated[int | None, flag("max_length", "Tokens of a row. Default: the model's context.")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut long prompts at their beginning, and count them.")
    ] = False,
    dtype: Annotated[str, flag("dtype")] = "auto",
    device: Annotated[str, flag("device")] = "auto",
) -> None:
    if task is None and lm_eval is None and data is None:
        raise ConfigError("There is nothing to score: give --data FILE, --task all, --task NAME or --lm-eval NAME.")
    from frozencore.tune.locate import require_data_root, require_model
    from frozencore.tune.suite import find_tasks

    tasks = tuple(find_tasks(task)) if task is not None else ()
    require_model(model)
    require_data_root(data_root)
    if data is not None:
        require_source(data)
    adapters = tuple(map(adapter_in, adapter or ()))
    require_writable(output)
    from frozencore.cli.display import StageDisplay

    kept = told_if_nothing_is_kept(lambda: any(output.glob(f"*/*/{RECORD}")))
    with kept, StageDisplay(console) as progress:
        from frozencore.tune import evaluate as evaluation_of

        progress.started()
        harness_tasks = tuple(name.strip() for name in (lm_eval or "").split(",") if name.strip())
        evaluation = evaluation_of.Evaluation(
            model=model, tasks=tasks, data=data, columns=columns, harness_tasks=harness_tasks,
            include_path=include_path, adapters=adapters, with_base=with_base, data_root=data_root,
            prompt_style=cast(PromptStyle, prompt_style), prompt_date=date.fromisoformat(prompt_date),
            max_length=max_length, truncate=truncate, length_normalised=length_normalised,
            num_evaluation=num_evaluation, dtype=dtype, device=device,
        )  # fmt: skip
        record = evaluation_of.evaluate(evaluation, output, progress)
    console.print(evaluation_table(record))
    for run in runs_trained_on(data, adapters):
        console.print(f"{run} was trained on rows of {data}: its scores are not those of new rows.", soft_wrap=True)
    console.print(f"Predictions and scores: {output}")
    raise typer.Exit(1 if record["failed"] else 0)


def runs_trained_on(data: str | None, adapters: Sequence[Path]) -> list[Path]:
    """The folders of the runs that read the file of the scored rows, by its name in their records."""
    if data is None:
        return []
    from frozencore.tune.record import read_record

    found = []
    for run in (adapter.parent for adapter in adapters):
        with suppress(OSError, ValueError):  # a run without a sound record tells nothing
            read = read_record((run / RECORD).read_text(encoding="utf-8")).config.data
            if read is not None and Path(data).resolve() in [Path(one).resolve() for one in sources_of(read)]:
                found.append(run)
    return found


def evaluation_table(record: Mapping[str, Any]) -> Group:
    """Show every score of every adapter, the means, and the reasons for missing scores."""
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
    return Group(table, *map(Text, [*_means(record["scores"]), *_notes(record)]))


def _cells(score: Mapping[str, Any], counts: Mapping[str, str]) -> list[str]:
    error = score.get("standard_error") or None  # 0 where all rows are right or all wrong: the formula says nothing
    shares = [score["accuracy"], error, *(score.get(name) for name in ("chance", "majority_class"))]
    loss = score.get("held_out_loss")
    return [
        score["task"],
        str(score["num_examples"]),
        *("" if share is None else f"{100 * share:.1f}" for share in shares),
        *(str(score.get(count, "")) for count in counts),
        "" if loss is None else f"{loss:.3f}",
    ]


def _means(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    """Unweighted means, if all adapters have scores on the same two or more tasks."""
    by_subject: dict[str, dict[str, float]] = {}
    for score in scores:
        if score["accuracy"] is not None:
            by_subject.setdefault(score["subject"], {})[score["task"]] = score["accuracy"]
    tasks = [set(own) for own in by_subject.values()]
    if not tasks or len(tasks[0]) < 2 or any(own != tasks[0] for own in tasks):
        return []
    return [
        f"{subject}: mean of {len(own)} tasks {100 * sum(own.values()) / len(own):.1f} %"
        for subject, own in by_subject.items()
    ]


def _notes(record: Mapping[str, Any]) -> list[str]:
    from frozencore.tune.record import ReadRows

    metrics = {score["task"]: score["metric"] for score in record["scores"] if "metric" in score}
    readings = [ReadRows.model_validate_json(json.dumps(one)) for one in record.get("reading", {}).values()]
    return [
        *(reading.in_words for reading in readings),
        *(f"{task}: the harness's {metric}" for task, metric in metrics.items()),
        *(f"{task} was not scored: {reason}" for task, reason in record["failed"].items()),
    ]
