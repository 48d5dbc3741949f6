"""Options that several verbs take, and what their help says."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from frozencore.errors import ConfigError
from frozencore.tune.rows.prompt_date import PROMPT_DATE
from frozencore.words import unknown_name

DataRoot = Annotated[Path | None, typer.Option(help="Folder that holds the data sets under their hub ids.")]
PromptDate = Annotated[str, typer.Option(metavar="YYYY-MM-DD", help="Today, to a chat template that asks for it.")]
TODAY = PROMPT_DATE.isoformat()
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")


def read_date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"--prompt-date must be a day as YYYY-MM-DD, but {text!r} came.") from error


def require_name(kind: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is none of those.

    Raises:
        ConfigError: It is not known; the nearest one is offered.
    """
    if name not in known:
        raise ConfigError(unknown_name(kind, name, known))
