"""The user's own rows as a task, described by a YAML file beside them.

    name: capitals
    scoring: choice                 # or exact_match: a generated number
    train: train.jsonl              # .jsonl, .csv, .parquet and so on, beside this file; only `tune` needs it
    evaluation: test.jsonl
    prompt: "Question: {question}\\nAnswer:"
    choices: options                # a column that holds a list, or a list here: ["yes", "no"]
    answer: answer                  # a column: the text of a choice, or its position from 0; or the number
    epochs: 3

``{question}`` stands for the column of that name. Further keys: ``validation``, ``num_train``, ``num_evaluation``,
``max_new_tokens``, ``licence``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from frozencore.errors import ConfigError, DataError
from frozencore.files.strict_yaml import read_yaml
from frozencore.tune.rows.row_files import read_file
from frozencore.tune.tasks.answers import parse_number
from frozencore.tune.tasks.fields import position_of, texts_field
from frozencore.tune.tasks.task import Example, Origin, Split, Task

_COLUMN = re.compile(r"\{(\w+)\}")


class OwnTask(BaseModel):
    """The keys of the YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^\w[\w.-]{0,62}$")  # of a folder too
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

    def to_example(self, row: Mapping[str, Any], row_id: str) -> Example:
        """A row as prompt and answer."""
        prompt = _COLUMN.sub(lambda match: _shown(row, match[1], row_id), self.prompt)
        if self.choices is None:
            number = _shown(row, self.answer, row_id)
            if parse_number(number) is None:
                raise DataError(f"Row {row_id}: column {self.answer!r} must hold a number, but holds {number!r}.")
            return Example(row_id, prompt, f" The answer is: {number}")
        choices = self.choices if isinstance(self.choices, list) else texts_field(row, self.choices, row_id)
        labels = choices if isinstance(row.get(self.answer), str) else [str(i) for i in range(len(choices))]
        position = position_of(row, self.answer, labels, row_id)
        return Example(row_id, prompt, f" {choices[position]}", tuple(f" {choice}" for choice in choices))


@dataclass(frozen=True)
class FileSource:
    """Splits that are files."""

    files: Mapping[Split, Path]

    @property
    def origin(self) -> Origin:
        """The files' names."""
        return Origin("own files", "", {split: file.name for split, file in self.files.items()})

    def rows(self, split: Split, data_root: Path | None) -> Sequence[Mapping[str, Any]]:
        """The rows of a split, none where no file is named; ``data_root`` is not read."""
        return read_file(self.files[split], option=f"'{split}:'") if split in self.files else ()


def read_own_task(path: Path) -> Task:
    """The task that a YAML file describes.

    Raises:
        ConfigError: In one line, what is wrong with which key.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys such as name, scoring, evaluation, prompt, answer, but holds none.")
    try:
        own = OwnTask.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {key}: {first['msg'].lower()}, but {first['input']!r} came.") from error
    if (own.choices is not None) != (own.scoring == "choice"):
        raise ConfigError(
            f"{path}: choices belong to 'scoring: choice' and to nothing else; here it is {own.scoring!r}."
        )
    if isinstance(own.choices, list) and (len(own.choices) < 2 or not all(map(str.strip, own.choices))):
        raise ConfigError(f"{path}: choices: give two texts or more, none empty, but {own.choices!r} came.")
    named: dict[Split, str | None] = {"train": own.train, "validation": own.validation, "evaluation": own.evaluation}
    return Task(
        name=own.name,
        scoring=own.scoring,
        source=FileSource({split: path.parent / file for split, file in named.items() if file is not None}),
        to_example=own.to_example,
        num_train=own.num_train,
        num_evaluation=own.num_evaluation,
        epochs=own.epochs,
        licence=own.licence,
        max_new_tokens=own.max_new_tokens,
    )


def _shown(row: Mapping[str, Any], column: str, row_id: str) -> str:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        has = repr(value) if column in row else f"nothing (the columns are {', '.join(row)})"
        raise DataError(f"Row {row_id}: column {column!r} must hold text or a number, but holds {has}.")
    return str(value).strip()
