"""``frozencore tasks``: list the tasks, show a row as a model sees it, and write files for another evaluator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table
from rich.text import Text

from frozencore.cli.display import console
from frozencore.cli.flags import flag
from frozencore.errors import ConfigError
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder, PromptStyle
from frozencore.tune.tasks import HubDataset, Task

MARKS = "⟦", "⟧"

tasks_app = typer.Typer(no_args_is_help=True)


@tasks_app.command("list")
def list_tasks() -> None:
    """Print every task with its rows, epochs, scoring and data set."""
    from frozencore.tune.suite import TASKS

    table = Table()
    for heading in ("task", "train / evaluation rows", "epochs", "scoring", "data"):
        table.add_column(heading)
    for task in TASKS.values():
        rows, scoring = f"{task.num_train} / {task.num_evaluation}", task.scoring.replace("_", " ")
        table.add_row(task.name, rows, str(task.epochs), scoring, _place(task))
    console.print(table)


@tasks_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A task by name, or a YAML file of your own.")],
    model: Annotated[
        str | None, typer.Option(help="Model whose tokenizer and chat template are used. Default: the pocket model.")
    ] = None,
    data_root: Annotated[Path | None, flag("data_root")] = None,
    row: Annotated[int, typer.Option(help="Which training row.")] = 0,
    prompt_style: Annotated[str, flag("prompt_style")] = "auto",
) -> None:
    """Print a real example as the model sees it; the part in ⟦ ⟧ carries the loss."""
    from frozencore.tune.pocket import pocket_model_path
    from frozencore.tune.suite import find_task

    task = find_task(name)
    from frozencore.tune.load import load_tokenizer

    tokenizer = load_tokenizer(model or str(pocket_model_path()))
    encoder = PromptEncoder(tokenizer, style=cast(PromptStyle, prompt_style), max_length=1_000_000)
    for line in show_example(task, encoder, data_root, row):
        console.print(line, soft_wrap=True)


def show_example(task: Task, encoder: PromptEncoder, data_root: Path | None, number: int) -> Iterator[Text]:
    """Show a row of a task as the model sees it, with the part that carries the loss marked.

    Args:
        number: The row's index from 0, in the training split, or in the evaluation split if there is no other.

    Raises:
        ConfigError: There is no such row.
        DataError: The task's source or the row is invalid.
    """
    split = "train"
    rows = task.source.rows("train", data_root)
    if not rows:
        split, rows = "evaluation", task.source.rows("evaluation", data_root)
    if not 0 <= number < len(rows):
        raise ConfigError(
            f"--row must be from 0 to {len(rows) - 1} in the {split} split of {task.name!r}, got {number}."
        )
    example = task.to_example(rows[number], f"{split}-{number}")
    text = encoder.render(example)
    (row,) = encoder.training_rows([text])
    pieces = encoder.tokenizer.convert_ids_to_tokens(row.input_ids)
    context, completion = " ".join(pieces[: row.num_context]), " ".join(pieces[row.num_context :])
    yield Text(f"{task.name}, {example.id}: {_place(task)}; licence: {task.licence}", style="bold")
    style = "chat template" if encoder.is_chat else "plain"
    yield Text(f"\nText ({style}; the marked part carries the loss)", style="bold")
    yield marked(text.context, text.completion)
    yield Text(f"\nTokens ({row.num_context} of the prompt, {len(pieces) - row.num_context} with loss)", style="bold")
    yield marked(f"{context} ", completion)
    yield from _answers(task, example, encoder)


def marked(context: str, completion: str) -> Text:
    """A prompt and its completion, with the completion marked."""
    return Text.assemble(context, (f"{MARKS[0]}{completion}{MARKS[1]}", "reverse"))


def _answers(task: Task, example: Example, encoder: PromptEncoder) -> Iterator[Text]:
    """Say how an answer is scored, and show the choices if there are any."""
    if task.scoring == "text":
        yield Text("\nScored by held-out nats per token")
        return
    if task.scoring == "exact_match":
        yield Text(f"\nScored by the first number after 'The answer is:' or '####', in {task.max_new_tokens} tokens")
        return
    yield Text("\nChoices", style="bold")
    text = encoder.render(example)
    (tokens,) = encoder.choice_rows([text])
    for choice, ids in zip(text.choices, tokens.choice_ids, strict=True):
        right = "  <- right" if choice == text.completion else ""
        yield Text(f"{choice!r}, {len(ids)} tokens{right}")


def _place(task: Task) -> str:
    """The source of a task's rows."""
    source = task.source
    if isinstance(source, HubDataset):
        return source.path + (f", {source.config}" if source.config else "")
    return "files" if hasattr(source, "files") else "generated"
