"""The chat template of a tokenizer: it writes messages as text, and shows how it ends a turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from frozencore.errors import ConfigError, DataError

Message = Mapping[str, Any]
Messages = Sequence[Message]
Span = tuple[int, int]
_PROBE = ("qx0xq", "qx1xq", "qx2xq", "qx3xq")


def templates_of(tokenizer: Any) -> Collection[str]:
    """The chat templates of a tokenizer, which may have several."""
    templates = tokenizer.chat_template or ""
    return templates.values() if isinstance(templates, dict) else [templates]


class ChatTemplate:
    """The chat template of a tokenizer.

    Attributes:
        tokens: The texts of special and added tokens.

    Raises:
        ConfigError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "Chat messages and the prompt style 'chat' need a chat template, but this tokenizer has none. Use rows "
                "of prompt and completion (other columns: --columns prompt=NAME,completion=NAME) in the style 'plain'."
            )
        self.tokenizer = tokenizer
        self.tokens = added_tokens(tokenizer)

    def source(self, tools: Any = None) -> str:
        """The template that is used with these tools."""
        source: str = self.tokenizer.get_chat_template(None, tools)
        return source

    def write(
        self, messages: Messages, row_id: str = "", tools: Any = None, *, asks: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of messages, and the spans that the template marks.

        Args:
            asks: End with the prompt of the assistant's next turn.

        Raises:
            DataError: The template refuses the messages.
        """
        options = {"add_generation_prompt": asks, "return_assistant_tokens_mask": marked}
        try:
            text, marks = _render(self.source(tools), self.tokenizer.special_tokens_map, tools, messages, **options)
        except Exception as error:  # templates are programs and may raise any error
            raise DataError(f"Row {row_id}: the tokenizer's chat template refuses it: {error}") from error
        return text, marks

    @cached_property
    def _written_after(self) -> tuple[str, str]:
        """The text between an answer and the next question, and the text after the last answer of a conversation."""
        roles = ("user", "assistant") * 2
        try:
            text, _ = self.write([{"role": role, "content": mark} for role, mark in zip(roles, _PROBE, strict=True)])
        except DataError:
            return "", ""
        return text.partition(_PROBE[1])[2].partition(_PROBE[2])[0], text.partition(_PROBE[3])[2]

    @property
    def suffix(self) -> str:
        """The text after the last answer of a conversation."""
        return self._written_after[1]

    @property
    def end(self) -> str | None:
        """The token that ends the last answer of a conversation; None if the template writes none."""
        return self.first_token(self.suffix)

    @property
    def inner_end(self) -> str | None:
        """The token after an answer that a question follows; it may be the mark of the next turn."""
        return self.first_token(self._written_after[0])

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template takes a system message before the first question."""
        asked = {"role": "user", "content": "A"}
        try:
            self.write([{"role": "system", "content": "A"}, asked], asks=True)
        except DataError:
            return False
        return True

    def first_token(self, text: str) -> str | None:
        """The added token that a text begins with, after white space."""
        tokens = [token for token in self.tokens if text.lstrip().startswith(token)]
        return max(tokens, key=len, default=None)


def added_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The texts of special tokens and of tokens added to the vocabulary, which no other token can be merged with."""
    tokens = dict.fromkeys((*map(str, tokenizer.all_special_tokens), *tokenizer.get_added_vocab()))
    return tuple(token for token in tokens if token.strip())


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The texts of a tokenizer's special tokens, also of those that have no role."""
    tokens = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(dict.fromkeys((*map(str, tokenizer.all_special_tokens), *tokens)))


def _render(
    template: str, special_tokens: Mapping[str, Any], tools: Any, messages: Messages, **options: Any
) -> tuple[str, list[Span]]:
    """The template's text and the spans that it marks, for one conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template  # the import takes a second

    texts, marks = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=template, **options, **special_tokens
    )
    return texts[0], [tuple(mark) for mark in marks[0]] if marks else []
