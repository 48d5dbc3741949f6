"""``frozencore chat``: a conversation with several adapters; each streams its answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from frozencore.cli.flags import flag
from frozencore.errors import ConfigError, ModelError
from frozencore.files.adapter_folder import find_adapter, read_config
from frozencore.tune.folder import record_of_run
from frozencore.tune.locate import require_model
from frozencore.tune.rows.prompts import PromptStyle


def chat(
    adapters: Annotated[
        list[str] | None,
        typer.Argument(help="Folders of runs or of adapters, or hub ids; each answers. Default: the model alone."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The base model. Default: the first adapter's base model.")] = None,
    with_base: Annotated[bool, typer.Option("--with-base", help="Let the model without adapters answer too.")] = False,
    system: Annotated[
        str | None, typer.Option(help="The system message. Default: that of the rows which the adapter was trained on.")
    ] = None,
    prompt_style: Annotated[
        str | None, flag("prompt_style", "auto, chat or plain. Default: as the run of each adapter wrote its prompts.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The longest answer, in tokens; at most half of the context.")
    ] = 256,
    dtype: Annotated[
        str | None, flag("dtype", "Dtype of the model's weights. Default: that of the first adapter's run, or auto.")
    ] = None,
    device: Annotated[str, flag("device")] = "auto",
) -> None:
    folders = [find_adapter(adapter, with_tokenizer=True) for adapter in adapters or ()]
    if sys.stdin is None:
        raise ConfigError(
            "A chat reads the standard input, but that is closed. Start it in a terminal, or give a file."
        )
    name = model or (_base_of(folders[0]) if folders else None)
    if not isinstance(name, str) or not name:
        raise ConfigError("A chat needs a model, and no adapter names one. Give --model NAME.")
    try:
        require_model(name)
    except ModelError as error:
        if model is not None:
            raise
        raise ModelError(f"{error} The adapter names this model: give the one that it is now with --model.") from error
    from frozencore.cli.speakers import converse

    converse(
        name, folders, with_base=with_base, system=system, prompt_style=cast(PromptStyle | None, prompt_style),
        max_new_tokens=max_new_tokens, dtype=dtype, device=device,
    )  # fmt: skip


def _base_of(adapter: Path) -> Any:
    """The base model as the adapter's run was given it, which may be a short name; else as the adapter names it."""
    record = record_of_run(adapter)
    return (record and record.config.model) or read_config(adapter).get("base_model_name_or_path")
