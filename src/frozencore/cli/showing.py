"""A real training row of a task as the model sees it, with the tokens that carry the loss marked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from frozencore.errors import ConfigError
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.hub import HubDataset

MARKS = "⟦", "⟧"


def task_lines(tasks: dict[str, Task]) -> list[tuple[str, str, str, str, str]]:
    """Of each task its name, rows, epochs, scoring and where the rows come from."""
    return [
        (
            task.name,
            f"{task.num_train} / {task.num_evaluation}",
            str(task.epochs),
            task.scoring.replace("_", " "),
            _place(task),
        )
        for task in tasks.values()
    ]


def show_example(task: Task, encoder: PromptEncoder, data_root: Path | None, number: int) -> Iterator[Text]:
    """Lines that show one row.

    Args:
        number: Of the row in the training split (the evaluation split, where a task has no other), from 0.

    Raises:
        ConfigError: There is no row of that number.
        DataError: From the task's source or the row.
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
    yield Text(f"{task.name}, {example.id}: {_place(task)}; licence: {task.licence}", style="bold")
    yield Text(f"\nText ({'chat template' if encoder.is_chat else 'plain'}; what carries loss is marked)", style="bold")
    yield Text.assemble(text.context, (f"{MARKS[0]}{text.completion}{MARKS[1]}", "reverse"))
    yield Text(f"\nTokens ({row.num_context} of the prompt, {len(pieces) - row.num_context} with loss)", style="bold")
    yield Text.assemble(
        " ".join(pieces[: row.num_context]),
        " ",
        (f"{MARKS[0]}{' '.join(pieces[row.num_context :])}{MARKS[1]}", "reverse"),
    )
    yield from _answers(task, example, encoder)


def _answers(task: Task, example: Example, encoder: PromptEncoder) -> Iterator[Text]:
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
    source = task.source
    if isinstance(source, HubDataset):
        return source.path + (f", {source.config}" if source.config else "")
    return "files" if hasattr(source, "files") else "generated"
