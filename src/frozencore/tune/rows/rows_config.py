"""Which rows a run reads, and how they become tokens."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from frozencore.errors import ConfigError
from frozencore.options import FrozenOptions
from frozencore.tune.rows.mixture import in_words, sources_of
from frozencore.tune.rows.prompt_date import PROMPT_DATE
from frozencore.tune.rows.prompts import LossOn, PromptStyle
from frozencore.words import flag_of


def _as_pathlib_spells(data: Any) -> Any:
    """Each source as pathlib spells it; a list of one is that one."""
    if isinstance(data, list | tuple):
        return _as_pathlib_spells(data[0]) if len(data) == 1 else tuple(map(_as_pathlib_spells, data))
    return str(Path(data)) if isinstance(data, str | Path) else data


class OwnRowsConfig(FrozenOptions):
    """How a user's own rows are read."""

    eval_data: Annotated[
        str | None,
        BeforeValidator(_as_pathlib_spells),
        Field(
            description="Rows to hold out, as --data takes them, in place of a tenth of --data. Rows of --data that "
            "read like one of them are not trained on."
        ),
    ] = None
    loss_on: Annotated[
        LossOn,
        Field(description="Which of the assistant's turns of a conversation have the loss: the last one, or all."),
    ] = "last"
    columns: Annotated[
        str | None, Field(description="Which column of --data is which: prompt=question,completion=answer.")
    ] = None
    skip_bad: Annotated[
        bool,
        Field(description="Leave out and count rows of --data that lack a column or hold nothing in it, and say why."),
    ] = False
    packing: Annotated[
        bool,
        Field(
            description="Concatenate texts, each with its end token, to rows of --max-length tokens; attention runs "
            "across, and a text may go on in the next row."
        ),
    ] = False


class RowsConfig(OwnRowsConfig):
    """The rows that a run learns, from a task or from a user's own files."""

    task: Annotated[str | None, Field(description="A task by name, for instance svamp or sst2.")] = None
    data: Annotated[
        str | tuple[str, ...] | None,
        BeforeValidator(_as_pathlib_spells),
        Field(
            description="Your own rows, JSONL, JSON, CSV, TSV, Parquet or Arrow, a split of a data set on the hub or "
            "in a folder (OWNER/NAME:train), or - (JSONL from a pipe): prompt and completion, messages, instruction "
            "and output (Alpaca), conversations (ShareGPT), or text. Give it several times for the rows of several "
            "sources; a.jsonl=2 beside b.jsonl draws two rows of the one for each row of the other."
        ),
    ] = None
    num_train: Annotated[int | None, Field(ge=1, description="Training rows. Default: the protocol's.")] = None
    num_evaluation: Annotated[
        int | None,
        Field(
            ge=1, description="Evaluation rows. Default: the protocol's; of own data a tenth, at most 500, is held out."
        ),
    ] = None
    paper_steps: Annotated[
        bool,
        Field(
            description="Train on all rows, as the paper's step counts imply: where a task has no others, no tenth is "
            "held out to validate on, but in a run that is scored on validation rows."
        ),
    ] = False
    max_length: Annotated[
        int | None, Field(ge=2, description="Tokens of a row. Default: 512, or the model's context if less.")
    ] = None
    truncate: Annotated[
        bool,
        Field(
            description="Cut long prompts at their beginning (texts without a prompt at their end) instead of refusing."
        ),
    ] = False
    skip_long: Annotated[
        bool,
        Field(description="Leave out and count rows that are too long; with --truncate, those whose completion is."),
    ] = False
    prompt_style: Annotated[PromptStyle, Field(description="How a task's prompts are written.")] = "auto"
    prompt_date: Annotated[date, Field(description="Today, to a chat template that asks for it.")] = PROMPT_DATE

    @model_validator(mode="after")
    def _are_of_one_source(self) -> RowsConfig:
        if (self.task is None) == (self.data is None):
            raise ConfigError("A run learns either a task (--task NAME) or your own rows (--data FILE): give one.")
        if self.task is not None:
            for name in self.given(OwnRowsConfig.model_fields):
                raise ConfigError(f"{flag_of(name)} is of your own rows (--data), but a task came. Leave one out.")
        if self.packing and (self.truncate or self.skip_long):
            raise ConfigError("Packed texts may be of any length: leave --truncate and --skip-long out.")
        if self.data is not None:
            sources_of(self.data)
        return self

    @property
    def learns(self) -> str:
        """The task or the sources of rows, in words."""
        return self.task or in_words(self.data)
