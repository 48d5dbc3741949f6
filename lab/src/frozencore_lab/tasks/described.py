"""Tasks described by a prompt with columns in braces: GLUE's (``paper.py``), and the user's own in a YAML file.

    name: capitals
    scoring: choice                 # or exact_match: a generated number
    train: train.jsonl              # .jsonl, .csv, .parquet and so on, beside this file; only `tune` needs it
    evaluation: test.jsonl
    prompt: "Question: {question}\\nAnswer:"
    choices: options                # a column that holds a list, or a list here: ["yes", "no"]
    answer: answer                  # a column: the text of a choice, or its position from 0; or the number
    epochs: 3

``{question}`` stands for the column of that name. A word in braces that is no column is refused, and so is a format
behind a name (``{price:.2f}``); a space inside, as in ``{ word }``, makes it text. Other braces are text.

Further keys: ``validation``, ``num_train``, ``num_evaluation``, ``max_new_tokens``, ``licence``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from frozencore.errors import ConfigError, DataError
from frozencore.tune.rows.row import RawRow, Row, held, text_field, texts_field
from frozencore.tune.rows.row_sources import read_source
from frozencore.tune.scoring.answers import find_answer, parse_answer, parse_number
from frozencore_lab.tasks.task import Origin, Split, Task
from frozencore_lab.typed_yaml import read_typed

_BRACES = re.compile(r"\{([^{}]+)\}")
_NAME = re.compile(r"[^\W\d]\w*(?:[ .-]+\w+)*")
_FORMAT = re.compile(r"[|:!(\[]")
_JINJA = re.compile(r"\{[{%#]")


@dataclass(frozen=True)
class Described:
    """Turn a raw row into a row; the fields are the keys of the YAML file."""

    prompt: str
    answer: str
    choices: Sequence[str] | str | None

    def __call__(self, row: RawRow, row_id: str) -> Row:
        """Fill the columns into the prompt, and find the answer; ``DataError`` if a column does not hold one."""
        shown: set[str] = set()

        def filled(braces: re.Match[str]) -> str:
            name = braces[1]
            is_format = _FORMAT.split(name, maxsplit=1)[0] in row
            if name not in row and not is_format and not _NAME.fullmatch(name):
                return braces[0]
            shown.add(name)
            return text_field(row, name, row_id, or_number=True)

        prompt = _BRACES.sub(filled, self.prompt)
        if not shown:
            raise DataError(
                f"Row {row_id}: the prompt must name a column in braces, but {self.prompt!r:.80} names none."
            )
        if self.choices is None:
            number = text_field(row, self.answer, row_id, or_number=True)
            completion = f" The answer is: {number}"
            value = parse_number(find_answer(number, gold=True) or number, alone=True)
            if value is None or value != parse_answer(completion, gold=True):
                raise DataError(
                    f"Row {row_id}: column {self.answer!r} must hold one number, with no more than words beside it, "
                    f"but holds {number!r:.80}."
                )
            return Row(row_id, prompt, completion)
        choices = self.choices
        if isinstance(choices, str):
            choices = [text.strip() for text in texts_field(row, choices, row_id)]
        position = position_of(row, self.answer, choices, row_id, or_position=True)
        return Row(row_id, prompt, f" {choices[position]}", tuple(f" {choice}" for choice in choices))


class OwnTask(BaseModel):
    """The keys of the YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^\w[\w.-]{0,62}$")  # becomes a folder's name
    scoring: Literal["choice", "exact_match"]
    evaluation: str
    prompt: str = Field(min_length=1)
    answer: str
    choices: list[str] | str | None = None
    train: str | None = None
    validation: str | None = None
    num_train: int = Field(default=2000, ge=1)
    num_evaluation: int = Field(default=500, ge=1)
    epochs: int = Field(default=1, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    licence: str = "the user's own"


@dataclass(frozen=True)
class FileSource:
    """Splits that are files; ``name`` says whose in a report."""

    files: Mapping[Split, Path]
    name: str = "own files"

    @property
    def origin(self) -> Origin:
        """The files' names."""
        return Origin(self.name, "", {split: file.name for split, file in self.files.items()})

    def rows(self, split: Split, data_root: Path | None) -> Sequence[RawRow]:
        """The rows of a split, empty without a file; ``data_root`` is not read."""
        return read_source(str(self.files[split]), option=f"'{split}:'") if split in self.files else ()


def read_own_task(path: Path) -> Task:
    """Read a task from a YAML file; a ``ConfigError`` names the key or value that is wrong."""
    own = read_typed(path, OwnTask, holds="a task")
    if (own.choices is not None) != (own.scoring == "choice"):
        raise ConfigError(
            f"{path}: choices belong to 'scoring: choice' and to nothing else; here it is {own.scoring!r}."
        )
    if isinstance(own.choices, list) and (len(own.choices) < 2 or not all(map(str.strip, own.choices))):
        raise ConfigError(f"{path}: choices: give two texts or more, none empty, but {own.choices!r} was given.")
    if _JINJA.search(own.prompt):
        raise ConfigError(
            f"{path}: prompt: columns are named as {{name}}, and Jinja is not read. Put a space between braces that "
            "are text, as in '{ {'."
        )
    if not _BRACES.search(own.prompt):
        raise ConfigError(f"{path}: prompt: name the columns that it shows in braces, as {{question}}; none is named.")
    named: dict[Split, str | None] = {"train": own.train, "validation": own.validation, "evaluation": own.evaluation}
    return Task(
        name=own.name,
        scoring=own.scoring,
        source=FileSource({split: path.parent / file for split, file in named.items() if file is not None}),
        to_row=Described(own.prompt, own.answer, own.choices),
        **own.model_dump(include={"num_train", "num_evaluation", "epochs", "licence", "max_new_tokens"}),
    )


def position_of(row: RawRow, column: str, labels: Sequence[str], row_id: str, *, or_position: bool = False) -> int:
    """The index of a column's label among the labels; ``2`` and ``"2"`` are the same.

    Args:
        or_position: Accept the index itself too, from 0.

    Raises:
        DataError: The column is missing, the row is unlabeled, its label is not among the labels, or it can be read
            both as a label and as the index of another one.
    """
    value = row.get(column)
    label = "" if value is None or value != value else str(value).strip()  # NaN differs from itself
    positions = [str(i) for i in range(len(labels))] if or_position else []
    found = {i for names in (labels, positions) for i, name in enumerate(names) if name == label}
    if not found:
        wanted = ", ".join(labels) + (f", or a position from 0 to {len(labels) - 1}" if or_position else "")
        raise DataError(f"Row {row_id}: column {column!r} must hold one of {wanted}, but holds {held(row, column)}.")
    if len(found) > 1:
        raise DataError(
            f"Row {row_id}: column {column!r} holds {held(row, column)}, which may be the choice "
            f"{' or '.join(repr(labels[i]) for i in sorted(found))}. Write choices that differ from each other and "
            "from positions."
        )
    return found.pop()
