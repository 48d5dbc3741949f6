"""``frozencore evaluate``: score a model, or several adapters on it, and print a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Group
from rich.text import Text

from frozencore.cli.display import console, table_of
from frozencore.cli.flags import flag
from frozencore.cli.stages import StageDisplay
from frozencore.errors import ConfigError, FrozenCoreError
from frozencore.files.adapter_folder import find_adapter
from frozencore.tune.folder import RECORD, record_of_run, require_new
from frozencore.tune.locate import require_data_root, require_model
from frozencore.tune.record import EvaluationRecord, TaskResult
from frozencore.tune.rows.prompts import PromptStyle, TooLong
from frozencore.tune.rows.row_sources import named, require_source, sources_of
from frozencore.tune.rows.sources import TASK, find_source, is_named, source_kind


def evaluate(
    model: Annotated[str, flag("model")],
    output: Annotated[Path, typer.Option("--out", "--output", help="New folder for the scores and predictions.")],
    task: Annotated[
        str | None, typer.Option(help="all (the paper's eleven), task names, or your own YAML files; comma-separated.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Rows, as for `tune --data`, of one source: scores the loss, and counts right choices and right short "
            "completions."
        ),
    ] = None,
    columns: Annotated[str | None, flag("columns")] = None,
    skip_bad: Annotated[bool, flag("skip_bad")] = False,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Folder of a run; folder or hub id of an adapter (cores, LoRA). May be repeated."),
    ] = None,
    with_base: Annotated[bool, typer.Option("--with-base", help="Score the model without adapters too.")] = False,
    data_root: Annotated[Path | None, flag("data_root")] = None,
    num_evaluation: Annotated[int | None, flag("num_evaluation", "Rows of a task. Default: the protocol's.")] = None,
    length_normalised: Annotated[
        bool, typer.Option("--length-normalised", help="Compare choices by log-likelihood per character.")
    ] = False,
    prompt_style: Annotated[
        str | None,
        flag("prompt_style", "auto, chat or plain. Default: as the run of each adapter wrote its prompts, else auto."),
    ] = None,
    max_length: Annotated[int | None, flag("max_length", "Tokens of a row. Default: the model's context.")] = None,
    too_long: Annotated[str, flag("too_long")] = "refuse",
    dtype: Annotated[str, flag("dtype")] = "auto",
    device: Annotated[str, flag("device")] = "auto",
) -> None:
    errors: dict[str, FrozenCoreError] = {}
    sources: dict[str, None] = {}
    for source in (*_tasks(task or ""), *([str(data)] if data is not None else [])):
        try:
            if is_named(source):
                find_source(source)
            else:
                require_source(source)
            sources[source] = None
        except FrozenCoreError as error:
            errors[named(source).removeprefix(f"{TASK}:")] = error
    if not sources:
        raise next(iter(errors.values()), ConfigError("There is nothing to score: give --data FILE or --task NAME."))
    require_model(model)
    require_data_root(data_root)
    adapters = tuple(find_adapter(one, with_tokenizer=True) for one in adapter or ())
    require_new(output, RECORD)
    failed = {name: str(one) for name, one in errors.items()}
    for name, reason in failed.items():
        console.print(f"{name} cannot be scored: {reason}", style="yellow", soft_wrap=True)
    with StageDisplay(console) as progress:
        from frozencore.tune.evaluate import Evaluation, evaluate_adapters

        progress.started()
        evaluation = Evaluation(
            model=model, data=tuple(sources), columns=columns, skip_bad=skip_bad, adapters=adapters,
            with_base=with_base, failed=failed, data_root=data_root, max_length=max_length,
            prompt_style=cast(PromptStyle | None, prompt_style), too_long=cast(TooLong, too_long),
            length_normalised=length_normalised, num_evaluation=num_evaluation, dtype=dtype, device=device,
        )  # fmt: skip
        record = evaluate_adapters(evaluation, output, progress)
    console.print(evaluation_table(record))
    for run in runs_trained_on(data, adapters):
        console.print(f"{run} was trained on rows of {data}: its scores are not those of new rows.", soft_wrap=True)
    console.print(f"Predictions and scores: {output}", soft_wrap=True)
    raise typer.Exit(1 if record.failed else 0)


def _tasks(names: str) -> Iterator[str]:
    """Yield the sources that a comma-separated list of tasks names; a name may stand for several."""
    kind = source_kind(TASK)
    for name in filter(None, map(str.strip, names.split(","))):
        yield from (f"{TASK}:{one}" for one in (kind.groups.get(name, (name,)) if kind else (name,)))


def runs_trained_on(data: str | None, adapters: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders of the runs that read the file of the scored rows, by its name in their records."""
    for adapter in adapters if data is not None and not is_named(data) else ():  # a task has evaluation rows apart
        record = record_of_run(adapter)
        read = None if record is None else record.config.data
        if read is not None and Path(data or "").resolve() in [Path(one).resolve() for one in sources_of(read)]:
            yield adapter.parent


COLUMNS = {
    "rows": "num_examples", "accuracy %": "accuracy", "± se": "standard_error", "chance": "chance",
    "majority": "majority_class", "truncated": "num_truncated", "no answer": "num_unanswered", "ties": "num_ties",
    "duplicates": "num_duplicate_choices", "cut prompts": "num_cut", "nats/token": "held_out_loss",
}  # fmt: skip
"""The columns of the table by heading; a column without a value, or with zeros alone, is left out."""


def evaluation_table(record: EvaluationRecord) -> Group:
    """Show every score of every adapter, the means, and the reasons for missing scores."""
    scored = [score for score in record.scores if score.failure is None]
    columns = {title: name for title, name in COLUMNS.items() if {_cell(score, name) for score in scored} - {"", "0"}}
    rows: list[tuple[str, ...] | None] = []
    for subject, results in groupby(record.scores, key=lambda score: score.subject):
        rows += [None] if rows else []
        for number, one in enumerate(results):
            cells = ("" if one.failure else _cell(one, name) for name in columns.values())
            rows.append(("" if number else subject, one.task, *cells))
    names = ("subject", "task")
    table = table_of(f"Evaluation of {record.model}", (*names, *columns), rows, names=names)
    reading = [record.reading.in_words] if record.reading else []
    reasons = dict.fromkeys(f"{one.task} was not scored: {one.failure}" for one in record.scores if one.failure)
    return Group(table, *map(Text, [*_means(scored), *reading, *reasons]))


def _cell(score: TaskResult, name: str) -> str:
    value = getattr(score if hasattr(score, name) else score.score, name, None)
    if value is None or (name == "standard_error" and not value):  # 0 where all rows are right or all wrong
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3f}" if name == "held_out_loss" else f"{100 * value:.1f}"


def _means(scores: Sequence[TaskResult]) -> list[str]:
    """Unweighted means, if all adapters have scores on the same two or more tasks."""
    by_subject: dict[str, dict[str, float]] = {}
    for score in scores:
        if score.score is not None:
            by_subject.setdefault(score.subject, {})[score.task] = score.score.accuracy
    tasks = [set(accuracies) for accuracies in by_subject.values()]
    if not tasks or len(tasks[0]) < 2 or any(accuracies != tasks[0] for accuracies in tasks):
        return []
    return [
        f"{subject}: mean of {len(accuracies)} tasks {100 * sum(accuracies.values()) / len(accuracies):.1f} %"
        for subject, accuracies in by_subject.items()
    ]
