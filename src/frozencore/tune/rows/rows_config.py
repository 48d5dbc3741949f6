"""The options of the rows: which rows a run reads, and how they become tokens."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from frozencore.errors import ConfigError
from frozencore.options import FrozenOptions
from frozencore.tune.rows.prompt_date import PROMPT_DATE
from frozencore.tune.rows.prompts import LossOn, PromptStyle
from frozencore.tune.rows.row_sources import in_words, sources_of
from frozencore.words import flag_of


def _as_pathlib_spells(data: Any) -> Any:
    """Write each source as pathlib does; a list of one source becomes that source."""
    if isinstance(data, list | tuple):
        return _as_pathlib_spells(data[0]) if len(data) == 1 else tuple(map(_as_pathlib_spells, data))
    return str(Path(data)) if isinstance(data, str | Path) else data


class OwnRowsConfig(FrozenOptions):
    """The options of a user's own rows."""

    eval_data: Annotated[
        str | None,
        BeforeValidator(_as_pathlib_spells),
        Field(
            description="Your own held-out rows, in the forms of --data, in place of a tenth of --data. Rows of --data "
            "with the same text are not trained on."
        ),
    ] = None
    loss_on: Annotated[
        LossOn,
        Field(description="Turns of the assistant in a conversation that carry the loss: the last one, or all."),
    ] = "last"
    columns: Annotated[
        str | None, Field(description="Names of the columns of --data, such as prompt=question,completion=answer.")
    ] = None
    skip_bad: Annotated[
        bool,
        Field(
            description="Leave out rows of --data with a missing or empty column; print their number and the reason."
        ),
    ] = False


class RowsConfig(OwnRowsConfig):
    """The options of the rows to learn, from a task or from a user's own files."""

    task: Annotated[str | None, Field(description="A task by name, for instance svamp or sst2.")] = None
    data: Annotated[
        str | tuple[str, ...] | None,
        BeforeValidator(_as_pathlib_spells),
        Field(
            description="Your own rows: a JSONL, JSON, CSV, TSV, Parquet or Arrow file, a split of a data set on the "
            "hub or in a folder (OWNER/NAME:train), or - (JSONL from a pipe). Columns: prompt and completion, "
            "messages, instruction and output (Alpaca), conversations (ShareGPT), or text. May be repeated for several "
            "sources."
        ),
    ] = None
    num_train: Annotated[int | None, Field(ge=1, description="Number of training rows. Default: the task's.")] = None
    num_evaluation: Annotated[
        int | None,
        Field(ge=1, description="Number of evaluation rows. Default: the task's; for --data a tenth, at most 500."),
    ] = None
    paper_steps: Annotated[
        bool,
        Field(
            description="Train on all rows, as the paper's step counts imply: a task without validation rows holds out "
            "none, unless the run is scored on validation rows."
        ),
    ] = False
    rows_by_seed: Annotated[
        bool,
        Field(
            description="Draw a task's training and evaluation rows by --seed, so that seeds differ in their rows too. "
            "Default: the same rows for every seed."
        ),
    ] = False
    max_length: Annotated[
        int | None, Field(ge=2, description="The most tokens of a row. Default: 512, or the model's context if less.")
    ] = None
    truncate: Annotated[
        bool,
        Field(
            description="Cut long prompts at their beginning, texts without a prompt at their end, instead of stopping."
        ),
    ] = False
    skip_long: Annotated[
        bool,
        Field(description="Leave out rows that are too long; with --truncate, only rows with a too long completion."),
    ] = False
    prompt_style: Annotated[PromptStyle, Field(description="How a task's prompts are written.")] = "auto"
    prompt_date: Annotated[date, Field(description="The date to give to a chat template that asks for today's.")] = (
        PROMPT_DATE
    )

    @model_validator(mode="after")
    def _are_of_one_source(self) -> RowsConfig:
        if (self.task is None) == (self.data is None):
            raise ConfigError("A run learns either a task (--task NAME) or your own rows (--data FILE): give one.")
        if self.task is not None:
            for name in self.given(OwnRowsConfig.model_fields):
                raise ConfigError(f"{flag_of(name)} is for your own rows (--data), but a task came. Leave one out.")
        if self.data is not None:
            sources_of(self.data)
        return self

    @property
    def learns(self) -> str:
        """The name of the task, or the sources of rows."""
        return self.task or in_words(self.data)
