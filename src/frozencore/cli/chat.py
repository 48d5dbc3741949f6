"""``frozencore chat``: a conversation with several adapters; each streams its answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from frozencore.cli.display import console
from frozencore.cli.flags import flag
from frozencore.errors import ConfigError, DataError
from frozencore.files.adapter_folder import adapter_in, folder_of, read_config
from frozencore.tune.locate import require_model
from frozencore.tune.rows.prompts import PromptStyle

if TYPE_CHECKING:
    from frozencore.tune.evaluate import BaseWithAdapter
    from frozencore.tune.rows.prompts import PromptEncoder

NEW, QUIT = "/new", "/quit"


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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 256,
    dtype: Annotated[
        str | None, flag("dtype", "Dtype of the model's weights. Default: that of the first adapter's run, or auto.")
    ] = None,
    device: Annotated[str, flag("device")] = "auto",
) -> None:
    folders = [adapter_in(folder_of(adapter)) for adapter in adapters or ()]
    if sys.stdin is None:
        raise ConfigError(
            "A chat reads the standard input, but that is closed. Start it in a terminal, or give a file."
        )
    name = model or (_base_of(folders[0]) if folders else None)
    if not isinstance(name, str) or not name:
        raise ConfigError("A chat needs a model, and no adapter names one. Give --model NAME.")
    require_model(name)
    from frozencore.tune.evaluate import BASE, BaseWithAdapter, adapter_names, settings_of, style_of
    from frozencore.tune.load import load_model
    from frozencore.tune.rows.prompts import PromptEncoder, context_limit

    runs = {folder: settings_of(folder) for folder in folders}
    first = runs[folders[0]] if folders else None
    base, tokenizer = load_model(name, dtype=dtype or (first and first.dtype) or "auto", device=device)
    limit = max(2, context_limit(base, tokenizer) - max_new_tokens)

    def speaker(own: str, folder: Path | None) -> Speaker:
        style = cast(PromptStyle, prompt_style or style_of(folder))
        encoder = PromptEncoder(tokenizer, style=style, max_length=limit, too_long="cut")
        if system is not None and not encoder.is_chat:
            raise ConfigError("--system needs a chat template, but this model's tokenizer has none: leave it out.")
        run = None if folder is None else runs[folder]
        return Speaker(own, folder, encoder, (run.system if run else None) if system is None else system)

    speakers = [speaker(BASE, None)] if with_base or not folders else []
    speakers += [speaker(own, folder) for own, folder in zip(adapter_names(folders), folders, strict=True)]
    adapted = BaseWithAdapter(base)
    for one in speakers:
        adapted.with_adapter(one.folder)  # refuses an adapter that does not fit before the first question
    is_plain = not all(one.encoder.is_chat for one in speakers)
    kept = " Without a chat template each line that you type is continued." if is_plain else ""
    console.print(f"{name}, {', '.join(one.name for one in speakers)}.{kept} {NEW}: a new chat; {QUIT}: the end.")
    for question in _questions():
        if question == NEW:
            for one in speakers:
                one.turns.clear()
            continue
        for one in speakers:
            one.answer(question, adapted, max_new_tokens)


def _base_of(adapter: Path) -> Any:
    """The base model as the adapter's run was given it, which may be a short name; else as the adapter names it."""
    from frozencore.tune.folder import record_of_run

    record = record_of_run(adapter)
    return (record and record.config.model) or read_config(adapter).get("base_model_name_or_path")


def _questions() -> Iterator[str]:
    """Yield the lines that the user types, or the lines of a file or pipe."""
    while True:
        try:
            line = console.input("\n> ").strip()
            line.encode()  # in some locales Python reads other bytes as halves of characters
        except (EOFError, KeyboardInterrupt):
            line = QUIT
        except UnicodeError as error:
            raise DataError("A chat reads lines of UTF-8 text, but this one is not. Save the file as UTF-8.") from error
        if line == QUIT:
            return
        if line:
            yield line


@dataclass
class Speaker:
    """A model that answers: an adapter on the base model, or the base model.

    Attributes:
        folder: The adapter's folder; None for the base model.
        encoder, system: How the prompts are written, and the system message.
        turns: The messages so far; each speaker remembers its own answers.
    """

    name: str
    folder: Path | None
    encoder: PromptEncoder
    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)

    def answer(self, question: str, base: BaseWithAdapter, max_new_tokens: int) -> None:
        """Stream the answer to a question. Ctrl-C ends the answer, not the chat."""
        from frozencore.tune.scoring.exact_match import stream_greedily

        self.turns.append({"role": "user", "content": question})
        encoder = self.encoder
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        context, num_cut = encoder.ask([*first, *self.turns], self.name)
        if num_cut:
            console.print(f"(The beginning is left out: {encoder.max_length} tokens fit.)", style="dim")
        console.print(f"\n{self.name}:", style="bold")
        pieces: list[str] = []

        def tell(words: str) -> None:
            pieces.append(words)
            console.print(words, end="", soft_wrap=True)

        with suppress(KeyboardInterrupt):
            model = base.with_adapter(self.folder)
            stream_greedily(model, context, encoder, max_new_tokens=max_new_tokens, tell=tell)
            if not "".join(pieces).strip():
                console.print("(The model ended its answer at once.)", style="dim", end="")
        console.print()
        self.turns.append({"role": "assistant", "content": "".join(pieces).strip()})
