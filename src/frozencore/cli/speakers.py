"""The speakers of a chat: each keeps its turns, and streams its answer to each question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from frozencore.adapter.loaded_adapter import frozen_core_layers
from frozencore.cli.display import console
from frozencore.errors import ConfigError, DataError
from frozencore.tune.evaluate import BASE, BaseWithAdapter, adapter_names, settings_of, style_of
from frozencore.tune.load import load_model, require_embeddings, tokenizer_of
from frozencore.tune.rows.prompts import PromptEncoder, PromptStyle, context_limit
from frozencore.tune.scoring.exact_match import stream_greedily
from frozencore.unwrapped_model import base_of

NEW, QUIT, GOES_ON = "/new", "/quit", "\\"


def converse(
    name: str,
    folders: Sequence[Path],
    *,
    with_base: bool,
    system: str | None,
    prompt_style: PromptStyle | None,
    max_new_tokens: int,
    dtype: str | None,
    device: str,
) -> None:
    """Load the model, and let it answer with each adapter until the user ends the chat.

    Raises:
        FrozenCoreError: The model or an adapter cannot be loaded, or there is no place for the system text.
    """
    runs = {folder: settings_of(folder) for folder in folders}
    first = runs[folders[0]] if folders else None
    base, tokenizer = load_model(name, dtype=dtype or (first and first.dtype) or "auto", device=device)
    context = context_limit(base, tokenizer)
    max_new_tokens = min(max_new_tokens, context // 2)  # a small model's context keeps place for the question

    def speaker(called: str, folder: Path | None) -> Speaker:
        own, style = tokenizer_of(folder, name, tokenizer), prompt_style or style_of(folder)
        encoder = PromptEncoder(own, style=style, max_length=context - max_new_tokens, too_long="cut")
        if system is not None and not encoder.is_chat:
            raise ConfigError("--system needs a chat template, but this model's tokenizer has none: leave it out.")
        run = None if folder is None else runs[folder]
        return Speaker(called, folder, encoder, (run.system if run else None) if system is None else system)

    speakers = [speaker(BASE, None)] if with_base or not folders else []
    speakers += [speaker(called, folder) for called, folder in zip(adapter_names(list(folders)), folders, strict=True)]
    adapted = BaseWithAdapter(base)
    for one in speakers:
        model = adapted.with_adapter(one.folder)  # refuses an adapter that does not fit before the first question
        cores = [layer.core("default") for layer in frozen_core_layers(model, "default").values()] if one.folder else []
        if cores and not any(core.any() for core in cores):
            console.print(
                f"{one.name} is not trained: its core is zero, so it answers as the base model.", style="yellow"
            )
    is_plain = not all(one.encoder.is_chat for one in speakers)
    kept = "Without a chat template each line is continued." if is_plain else "A question follows those before it."
    console.print(
        f"{name}, {', '.join(one.name for one in speakers)}. {kept} {GOES_ON} at the end of a line: another follows; "
        f"{NEW}: a new chat; {QUIT}: the end."
    )
    for question in _questions():
        if question == NEW:
            for one in speakers:
                one.turns.clear()
            continue
        for one in speakers:
            one.answer(question, adapted, max_new_tokens)


def _questions() -> Iterator[str]:
    """Yield what the user types, or the lines of a file or pipe; a line that goes on is one with the next."""
    while True:
        try:
            line = console.input("\n> ")
            with suppress(EOFError):  # what was typed before the end is a question too
                while line.endswith(GOES_ON):
                    line = f"{line.removesuffix(GOES_ON)}\n{console.input('  ')}"
            line = line.strip()
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
            require_embeddings(base_of(model), encoder.tokenizer, [context])
            stream_greedily(model, context, encoder, max_new_tokens=max_new_tokens, tell=tell)
            if not "".join(pieces).strip():
                console.print("(The model ended its answer at once.)", style="dim", end="")
        console.print()
        self.turns.append({"role": "assistant", "content": "".join(pieces).strip()})
