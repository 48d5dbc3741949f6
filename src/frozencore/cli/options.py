"""Options that several verbs take, and what their help says."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from frozencore.errors import ConfigError
from frozencore.lab.rows.prompt_date import PROMPT_DATE

Model = Annotated[str, typer.Option(help="Hub id or local folder of a causal language model.")]
TaskName = Annotated[str | None, typer.Option("--task", help="A task by name, for instance svamp or sst2.")]
Data = Annotated[
    Path | None, typer.Option(help="Your own JSONL or Parquet rows: prompt and completion, messages, or text.")
]
DataRoot = Annotated[Path | None, typer.Option(help="Folder that holds the task's data set under its hub id.")]
Method = Annotated[str, typer.Option(help="What to train:")]  # NamesMethods adds which there are
Rank = Annotated[int, typer.Option(help="Rank r of the bases; a core holds r x r values.")]
Targets = Annotated[
    str | None, typer.Option(help="Layer names, comma-separated, or all-linear. Default: the attention projections.")
]
CalibrationSize = Annotated[int, typer.Option(help="Training rows that the calibration pass reads.")]
Seed = Annotated[int, typer.Option(help="Of calibration rows, row order and random directions.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens of a row. Default: 512, or the model's context if less.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut long prompts at their beginning instead of refusing.")]
PromptDate = Annotated[str, typer.Option(metavar="YYYY-MM-DD", help="Today, to a chat template that asks for it.")]
TODAY = PROMPT_DATE.isoformat()
Whiten = Annotated[str, typer.Option(help="fcca: both, input, output or none.")]
Fisher = Annotated[str, typer.Option(help="fcca: diagonal, or dense (K-FAC).")]
Damping = Annotated[float, typer.Option(help="fcca: damping relative to the mean second moment.")]
Coordinates = Annotated[str, typer.Option(help="qr, polar, or the ablations raw and scaled_raw.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]


def read_date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"--prompt-date takes a day as YYYY-MM-DD, got {text!r}.") from error


class NamesMethods(TyperCommand):
    """A verb whose help lists the method table, if it takes a method; the table is imported only then."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            if option.name == "method":
                from frozencore.lab.methods import METHODS

                option.help = f"{option.help} {', '.join(METHODS)}."  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


def read_targets(text: str | None) -> Any:
    if text is None or text == "all-linear":
        return text
    return tuple(part.strip() for part in text.split(",") if part.strip())
