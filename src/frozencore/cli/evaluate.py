"""``frozencore evaluate`` and ``frozencore tasks``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from frozencore.cli.options import DTYPE_NAMES, TODAY, DataRoot, PromptDate, read_date, require_name
from frozencore.errors import ConfigError
from frozencore.files.adapter_folder import adapter_in

STYLES = ("auto", "chat", "plain")

PromptStyleName = Annotated[str, typer.Option(help="auto, chat or plain.")]
NumRows = Annotated[int | None, typer.Option("--num-evaluation", help="Rows of a task. Default: the protocol's.")]

tasks_app = typer.Typer(no_args_is_help=True)


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Hub id, local folder or GGUF file of a causal language model.")],
    output: Annotated[Path, typer.Option("--output", "--out", help="Folder of the scores; finished ones are kept.")],
    task: Annotated[
        str | None, typer.Option(help="all (the paper's eleven), names, or YAML files of your own; comma-separated.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Your own rows, as for `tune --data`: loss, and how many short completions are right."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Which column of --data is which: prompt=question,completion=answer.")
    ] = None,
    lm_eval: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness by name (needs frozencore[lm-eval]).")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder of task files for --lm-eval.")] = None,
    adapter: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a run, or of an adapter (cores, LoRA); may be repeated."),
    ] = None,
    with_base: Annotated[bool, typer.Option("--with-base", help="Score the model without adapters too.")] = False,
    data_root: DataRoot = None,
    num_evaluation: NumRows = None,
    length_normalised: Annotated[
        bool, typer.Option("--length-normalised", help="Compare choices by log-likelihood per character.")
    ] = False,
    prompt_style: PromptStyleName = "auto",
    prompt_date: PromptDate = TODAY,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a row. Default: the model's context.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut long prompts at their beginning, and count them.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
) -> None:
    require_name("prompt style", prompt_style, STYLES)
    require_name("dtype", dtype, DTYPE_NAMES)
    if task is None and lm_eval is None and data is None:
        raise ConfigError("There is nothing to score: give --data FILE, --task all, --task NAME or --lm-eval NAME.")
    from frozencore.tune.rows.row_sources import require_source
    from frozencore.tune.run.early import require_data_root, require_model
    from frozencore.tune.suite import find_tasks

    tasks = tuple(find_tasks(task)) if task is not None else ()
    require_model(model)
    require_data_root(data_root)
    if data is not None:
        require_source(data)
    adapters = tuple(map(adapter_in, adapter or ()))
    from frozencore.cli.display import StageDisplay
    from frozencore.cli.evaluation_tables import evaluation_table
    from frozencore.tune.evaluation.evaluate import Evaluation
    from frozencore.tune.evaluation.evaluate import evaluate as run_evaluation

    evaluation = Evaluation(
        model=model,
        tasks=tasks,
        data=data,
        columns=columns,
        harness_tasks=tuple(name.strip() for name in (lm_eval or "").split(",") if name.strip()),
        include_path=include_path,
        adapters=adapters,
        with_base=with_base,
        data_root=data_root,
        prompt_style=cast(Any, prompt_style),
        prompt_date=read_date(prompt_date),
        max_length=max_length,
        truncate=truncate,
        length_normalised=length_normalised,
        num_evaluation=num_evaluation,
        dtype=dtype,
        device=device,
    )
    console: Console = context.obj
    with StageDisplay(console) as progress:
        record = run_evaluation(evaluation, output, progress)
    console.print(evaluation_table(record))
    console.print(f"Predictions and scores: {output}", highlight=False)
    raise typer.Exit(1 if record["failed"] else 0)


@tasks_app.command("list")
def list_tasks(context: typer.Context) -> None:
    """Every task with its rows, epochs, scoring and data set."""
    from frozencore.cli.showing import task_lines
    from frozencore.tune.suite import TASKS

    table = Table()
    for heading in ("task", "train / evaluation rows", "epochs", "scoring", "data"):
        table.add_column(heading)
    for line in task_lines(TASKS):
        table.add_row(*line)
    context.obj.print(table)


@tasks_app.command("show")
def show_task(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A task by name, or a YAML file of your own.")],
    model: Annotated[
        str | None, typer.Option(help="Whose tokenizer and chat template to show. Default: the pocket model's.")
    ] = None,
    data_root: DataRoot = None,
    row: Annotated[int, typer.Option(help="Which training row.")] = 0,
    prompt_style: PromptStyleName = "auto",
) -> None:
    """Print a real example as the model sees it; what stands in ⟦ ⟧ carries the loss."""
    from frozencore.cli.showing import show_example
    from frozencore.tune.pocket import pocket_model_path
    from frozencore.tune.rows.prompts import PromptEncoder
    from frozencore.tune.run.loading import load_tokenizer
    from frozencore.tune.suite import find_task

    require_name("prompt style", prompt_style, STYLES)
    task = find_task(name)
    tokenizer = load_tokenizer(model or str(pocket_model_path()))
    encoder = PromptEncoder(tokenizer, style=cast(Any, prompt_style), max_length=1_000_000)
    for line in show_example(task, encoder, data_root, row):
        context.obj.print(line, soft_wrap=True)


@tasks_app.command("export")
def export(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="New folder for the task files.")],
    to: Annotated[str, typer.Option(help="lm-eval: files for lm_eval --include_path.")] = "lm-eval",
    task: Annotated[str, typer.Option(help="all, or names separated by commas.")] = "all",
    data_root: DataRoot = None,
    num_evaluation: NumRows = None,
) -> None:
    """Write tasks, with their evaluation rows, in a form that another evaluator runs."""
    from frozencore.tune.evaluation.harness_files import export_tasks
    from frozencore.tune.suite import find_tasks

    require_name("export", to, ("lm-eval",))
    names = export_tasks(find_tasks(task), folder, data_root=data_root, num_evaluation=num_evaluation)
    context.obj.print(f"lm_eval --include_path {folder} --tasks {','.join(names)}", highlight=False, soft_wrap=True)
