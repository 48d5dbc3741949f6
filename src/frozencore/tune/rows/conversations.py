"""Render conversations with the chat template, and find the assistant's turns, which carry the loss.

A template may mark the turns itself (``{% generation %}``). Otherwise a turn is the text that the template adds to the
turn's prompt, including its end token. This needs a template that writes a turn the same way, whatever follows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from frozencore.errors import ConfigError, DataError
from frozencore.tune.rows import TextRow

Messages = Sequence[Mapping[str, Any]]
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_chat(
    tokenizer: Any,
    messages: Messages,
    row_id: str,
    tools: Sequence[Any] | None = None,
    *,
    asks: bool = True,
    marked: bool = False,
) -> Any:
    """Render messages as text.

    Args:
        asks: Append the prompt of the assistant's next turn.
        marked: Return tokens with offsets and a mask of the assistant's turns instead.

    Raises:
        ConfigError: The tokenizer has no chat template.
        DataError: The template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            "Chat messages need a chat template, but this tokenizer has none. Use prompt/completion rows."
        )
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": asks}
    if marked:
        offsets = {"return_offsets_mapping": True}
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": offsets}
    try:
        return tokenizer.apply_chat_template(list(messages), tools=tools, **options)
    except Exception as error:  # templates are programs and may raise any error
        raise DataError(f"Row {row_id}: the tokenizer's chat template refuses it: {error}") from error


def every_turn(tokenizer: Any, messages: Messages, row_id: str, tools: Sequence[Any] | None = None) -> TextRow:
    """The text of a conversation, divided into pieces with and without loss.

    Raises:
        DataError: The template writes a turn differently if another turn follows, or marks none.
    """
    chat = partial(render_chat, tokenizer, row_id=row_id, tools=tools)
    whole = chat(messages, asks=False)
    spans = _marked(chat(messages, marked=True)) if _marks(tokenizer) else _rendered(messages, row_id, whole, chat)
    if not spans:
        raise DataError(f"Row {row_id}: the chat template marks none of the assistant's turns. Use --loss-on last.")
    cuts = [place for span in spans for place in span]
    pieces = [whole[start:stop] for start, stop in pairwise(cuts)]
    pieces[-1] = pieces[-1].removesuffix(tokenizer.eos_token)  # added to every row later
    return TextRow(row_id, whole[: cuts[0]], "".join(pieces), templated=True, turns=tuple(pieces))


def _marks(tokenizer: Any) -> bool:
    return any(map(_MARKS.search, templates_of(tokenizer)))


def templates_of(tokenizer: Any) -> Collection[str]:
    """The chat templates of a tokenizer, which may have several."""
    templates = tokenizer.chat_template or ""
    return templates.values() if isinstance(templates, dict) else [templates]


def _rendered(messages: Messages, row_id: str, whole: str, chat: Callable[..., Any]) -> list[tuple[int, int]]:
    """The beginning and end of each of the assistant's turns: the text that the template adds to the turn's prompt."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, turn = chat(messages[:number]), chat(messages[: number + 1], asks=False).rstrip()
        said = turn[len(prompt) :]
        if not (turn.startswith(prompt) and whole.startswith(turn) and message["content"].strip() in said):
            raise DataError(
                f"Row {row_id}: the chat template writes turn {number + 1}, the assistant's, otherwise than after its "
                "prompt, so the loss of all turns cannot be placed. Use --loss-on last."
            )
        spans.append((len(prompt), len(turn)))
    return spans


def _marked(encoded: Any) -> list[tuple[int, int]]:
    """The beginning and end of each run of marked tokens, in characters."""
    spans: list[tuple[int, int]] = []
    last_end, was_marked = 0, False
    for (_, end), marked in zip(encoded["offset_mapping"], encoded["assistant_masks"], strict=True):
        if marked:
            spans = [*spans[:-1], (spans[-1][0], end)] if was_marked else [*spans, (last_end, end)]
        last_end, was_marked = end, bool(marked)
    return spans
