"""A row as text and as tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextRow:
    """A row as text, to the byte. ``templated`` contexts carry the special tokens of the chat template."""

    id: str
    context: str
    completion: str
    choices: tuple[str, ...] = ()
    templated: bool = False


@dataclass(frozen=True)
class TokenRow:
    """A row as tokens. The loss is on ``input_ids[num_context:]``."""

    id: str
    input_ids: list[int]
    num_context: int


@dataclass(frozen=True)
class ChoiceTokens:
    """The tokens of a prompt and of each choice that may follow it."""

    id: str
    context_ids: list[int]
    choice_ids: list[list[int]]
