"""Render conversations with the chat template, and find the assistant's turns, which carry the loss.

The template writes a conversation once, as a whole; a turn is a span of that text. A template may mark the spans itself
(``{% generation %}``, as TRL's training templates do). Otherwise only the last turn is found: it begins where its
prompt ends, without a thought that only the prompt opens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from frozencore.errors import DataError
from frozencore.text import HALF_A_CHARACTER
from frozencore.tune.rows.chat_template import ChatTemplate, Message, Messages, Span, special_tokens
from frozencore.tune.rows.row import NOT_WRITTEN, OTHER_PROMPT, OTHER_ROLE
from frozencore.tune.rows.row_sources import json_or_value

LossOn = Literal["last", "all"]
Text = TypeVar("Text", str, list[int])
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPEN_THOUGHT = re.compile(r"(?:</?think>\s*)+$")
_FLAGS = ("weight", "train", "loss", "loss_mask", "trainable")
_TRUTHS = dict.fromkeys(("true", "1", "1.0", "yes"), True) | dict.fromkeys(("false", "0", "0.0", "no"), False)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_TEXT = ("role", "type", "id", "tool_call_id")  # a template may take these in one form only
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # transformers gives a template one of these as the others
_NESTED = f"a thought in the content as such, but an empty one before it; give it as {_THOUGHTS[0]}"
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
SYSTEM_FOLDED = "the system text stands before the first question, as the chat template takes no system turn"


@dataclass(frozen=True)
class RenderedRow:
    """A row as exact text, before it is tokenised.

    Attributes:
        choices: Texts that may follow the context, without an end.
        labels, right: The choices as the row gives them, and the index of the right one.
        templated: Whether the chat template wrote the text, with its own start token.
        loss_spans: The spans of the completion with loss, as beginnings and ends; empty for all of it.
        num_answer_spans: The number of these spans that the last turn has.
        suffix: The text of the template after the completion. It has no loss and is not read. None if the completion
            has no end token of its own; then one is added.
        system: The system text that the conversation begins with, empty for none; None if it is no conversation.
        changed: Notes for the user on changes to the row, and on parts that the template does not write.

    Raises:
        DataError: A text has half of a surrogate pair.
    """

    id: str
    context: str
    completion: str
    choices: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    right: int = 0
    templated: bool = False
    loss_spans: tuple[Span, ...] = ()
    num_answer_spans: int = 1
    suffix: str | None = None
    system: str | None = None
    changed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if HALF_A_CHARACTER.search("".join((self.whole, *self.choices))):
            raise DataError(f"Row {self.id}: a row must hold text, but half a character of UTF-16 is in it.")

    @property
    def whole(self) -> str:
        """The text that is tokenised."""
        return self.context + self.completion + (self.suffix or "")


class Conversation:
    """Messages in the form that a chat template takes.

    Arguments of tool calls that are JSON text become objects. If a template refuses a message without content, it gets
    empty content. If it refuses arguments that are objects, or writes them as Python does, it gets JSON text: the text
    as given, if it was text. If it takes no system message, the system text stands before the first question.

    Args:
        messages: Each has a role and a content; a flag such as ``weight`` 0 or ``train`` false takes the loss from the
            assistant's message.
        tools: The tools that the assistant may call.

    Raises:
        DataError: The template refuses the messages.
    """

    def __init__(
        self, template: ChatTemplate, messages: Messages, row_id: str, tools: Sequence[Any] | None = None
    ) -> None:
        self.template, self.row_id, self.tools = template, row_id, tools
        self.is_folded = _has_system(messages) and not template.takes_system
        if self.is_folded:
            text = "\n\n".join(message["content"] for message in messages[:2])
            messages = [{**messages[1], "content": text}, *messages[2:]]
        self.has_loss = [self._flag(message) for message in messages]
        plain = [_without_flags(message, row_id) for message in messages]
        rule = f"Row {row_id}: 'arguments' of a tool call must hold an object"
        given = [
            _with_arguments(message, lambda value: json_or_value("{}" if value == "" else value, Mapping, rule))
            for message in plain
        ]
        forms: list[list[Message]] = [given]
        if any(message.get("tool_calls") for message in plain):
            as_text = [_with_arguments(message, _json_text) for message in plain]
            forms = [[{**empty, **message} for message in form] for form in (given, as_text) for empty in _EMPTIES]
        objects = [arguments for message in given for arguments in _arguments(message) if arguments]
        for form in forms:
            self.messages = form
            with suppress(DataError):
                text = self.prompt(len(form))
                if form is forms[-1] or not any(str(arguments) in text for arguments in objects):
                    return
        self.messages = given
        self.prompt(len(given))  # raises the template's reason for the messages as they are

    def prompt(self, count: int) -> str:
        """The text of the first messages, and of the prompt of the assistant's next turn."""
        return self._write(count, asks=True)[0] if count else ""

    def row(self, loss_on: LossOn = "last", num_completion: int = 1) -> RenderedRow:
        """The conversation as a row.

        Args:
            loss_on: The loss is on all the assistant's turns, or on those in the completion.
            num_completion: The number of messages at the end that are the completion.

        Raises:
            DataError: A turn cannot be found, no turn has loss, or one with loss is empty.
        """
        asked = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        first = 0 if loss_on == "all" else len(self.messages) - num_completion
        wanted = [number for number in asked if number >= first and self.has_loss[number]]
        if not wanted:
            raise DataError(
                f"Row {self.row_id}: no turn to learn is left, as messages have weight 0 or train false "
                "(or loss, loss_mask, trainable)."
            )
        said = ("content", "tool_calls", *_THOUGHTS)
        if empty := [number for number in wanted if not any(self.messages[number].get(key) for key in said)]:
            raise DataError(
                f"Row {self.row_id}: a turn with loss must hold text or a call, but turn {empty[0] + 1}, the "
                "assistant's, is empty. Give it weight 0."
            )
        if _MARKS.search(self.template.source(self.tools)):
            whole, turns = self._marked(asked)
        else:
            whole, _ = self._write(len(self.messages))
            turns = {wanted[-1]: [self._last_turn(wanted, whole)]}
        dropped = self._dropped(whole, {number: turns[number] for number in wanted})
        spans: list[Span] = []
        for start, stop in (span for number in wanted for span in turns[number]):
            follows = bool(spans) and spans[-1][1] == start
            spans[-1:] = [(spans[-1][0], stop)] if follows else [*spans[-1:], (start, stop)]
        start, stop = (spans[0][0], spans[-1][1]) if spans else (len(whole), len(whole))
        begin = turns[wanted[-1]][0][0] if turns[wanted[-1]] else start
        is_ended = self._is_ended(wanted[-1], whole[begin:stop])  # else generation could not stop there
        return RenderedRow(
            self.row_id,
            whole[:start],
            whole[start:stop],
            templated=True,
            loss_spans=tuple((first - start, end - start) for first, end in spans) if len(spans) > 1 else (),
            num_answer_spans=sum(end > begin for _, end in spans),
            suffix=whole[stop:] if is_ended else None,
            changed=(*([SYSTEM_FOLDED] if self.is_folded else []), *dropped, *self._other_prompt(wanted[-1], whole)),
        )

    def _write(self, count: int, *, asks: bool = False, marked: bool = False) -> tuple[str, list[Span]]:
        return self.template.write(self.messages[:count], self.row_id, self.tools, asks=asks, marked=marked)

    def _flag(self, message: Message) -> bool:
        given = {name: message[name] for name in _FLAGS if message.get(name) is not None}
        truths = [_TRUTHS.get(str(value).strip().lower()) for value in given.values()]
        if None in truths:
            raise DataError(f"Row {self.row_id}: a message's flags of loss must be true or false, 0 or 1, got {given}.")
        return all(truths)

    def _marked(self, asked: Sequence[int]) -> tuple[str, dict[int, list[Span]]]:
        """The whole text, and for each of the assistant's messages the spans that the template marks."""
        whole, marks = self._write(len(self.messages), marked=True)
        turns = {number: [mark] for number, mark in zip(asked, marks, strict=False)}
        in_order = (not self._missing(number, whole[start:stop]) for number, ((start, stop),) in turns.items())
        if len(marks) != len(asked) or not all(in_order):
            # a turn may have several marks, or none: its marks end after the prompt of its answer
            begins = {number: len(shared_beginning([self.prompt(number), whole])) for number in asked}
            turns = {number: [] for number in asked}
            for mark in marks:
                owners = [number for number in asked if begins[number] < mark[1]]
                turns[owners[-1] if owners else asked[0]].append(mark)
        turns = {number: [(start, stop) for start, stop in spans if stop > start] for number, spans in turns.items()}
        for number, spans in turns.items():
            if spans:
                spans[-1] = (spans[-1][0], self._end_of(number, whole, *spans[-1]))
        return whole, turns

    def _last_turn(self, wanted: Sequence[int], whole: str) -> Span:
        """The span of the last turn, after its prompt.

        Raises:
            DataError: Other turns have loss too, or the template writes the last one otherwise than after its prompt.
        """
        last = len(self.messages) - 1
        if list(wanted) != [last]:
            raise DataError(
                f"Row {self.row_id}: loss on turns before the last one needs a chat template that marks them with "
                "{% generation %}, but this one does not. Use --loss-on last, or save the tokenizer with such a "
                "template (TRL has training templates of many models)."
            )
        prompt = self.prompt(last)
        if not whole.startswith(prompt):
            prompt = _OPEN_THOUGHT.sub("", prompt)  # the template does not write the thought that the prompt opens
        if not last or not whole.startswith(prompt):
            raise DataError(
                f"Row {self.row_id}: the chat template writes turn {last + 1}, the assistant's, otherwise than after "
                "its prompt, so the tokens with loss cannot be placed. Use rows of prompt and completion with "
                "--prompt-style plain, or a template that marks the turns with {% generation %}."
            )
        suffix = self.template.suffix
        ended = len(whole) - len(suffix) + len(suffix.rstrip())
        return len(prompt), ended if whole.endswith(suffix) else len(whole.rstrip())

    def _other_prompt(self, number: int, whole: str) -> list[str]:
        """A note if the text goes on otherwise than the prompt with which a chat asks for a turn."""
        try:
            prompt = self.prompt(number)
            if whole.startswith(prompt):
                return []
            before, _ = self._write(number)
        except DataError:  # the template takes no conversation that ends here
            return []
        shared, asks = (len(shared_beginning([prompt, text])) for text in (whole, before))
        if shared < asks:  # a template may write a turn in another way once a turn follows
            return []
        return [
            f"{OTHER_PROMPT} {prompt[asks:]!r}, but the row goes on otherwise, so answers in a chat may be worse than "
            "the scores; use rows that go on from this prompt (with a thought, or without), or another chat template"
        ]

    def _end_of(self, number: int, whole: str, start: int, stop: int) -> int:
        """The end of a turn with the token after it, if it does not end with a token at which generation stops."""
        token = None if self._is_ended(number, whole[start:stop]) else self.template.first_token(whole[stop:])
        return stop if token is None else whole.index(token, stop) + len(token)

    def _is_ended(self, number: int, turn: str) -> bool:
        """Return whether a turn ends with a token at which generation stops.

        A call may be written in added tokens, so only a special one ends it, and only if the template ends texts too;
        in GLM's the next turn's first token is the end.
        """
        ends = {self.template.tokenizer.eos_token, self.template.inner_end} - {None}
        ends |= {token for token in self.template.tokens if token in self.template.suffix}
        if self.messages[number].get("tool_calls") and self.template.end is not None:
            ends |= set(special_tokens(self.template.tokenizer))
        return turn.rstrip().endswith(tuple(ends))

    def _missing(self, number: int, text: str) -> list[str]:
        """The calls and the content of a message that do not stand in a text."""
        content, calls = self.messages[number].get("content"), self.messages[number].get("tool_calls") or ()
        called = (call.get("function") or call for call in calls if isinstance(call, Mapping))
        missing = [f"the call of {name!r}" for call in called if (name := str(call.get("name"))) not in text]
        is_written = all(_stands_in(text, part) for part in _texts(content))
        return [*missing, *([] if is_written and (text or not str(content or "").strip()) else ["the content"])]

    def _dropped(self, whole: str, turns: Mapping[int, Sequence[Span]]) -> tuple[str, ...]:
        """Notes on the parts of the conversation that the template does not write, and on roles that it does not name.

        A content is written if it stands in the text, and so is a thought beside it in a turn with loss. Another key is
        written if the template names it. A turn without loss may lack its thought.

        Args:
            turns: The spans of the turns with loss.

        Raises:
            DataError: The content or a call of a turn with loss is missing.
        """
        source, lost = _COMMENT.sub("", self.template.source(self.tools)), dict[str, None]()
        for number, message in enumerate(self.messages):
            role, content, calls = str(message["role"]), message.get("content"), message.get("tool_calls") or ()
            text = "".join(whole[start:stop] for start, stop in turns[number]) if number in turns else whole
            if number in turns:
                missing = self._missing(number, text)
                if missing:
                    raise DataError(
                        f"Row {self.row_id}: the chat template does not write {missing[0]} of turn {number + 1}, the "
                        "assistant's."
                    )
                thought = str(content or "").rpartition("</think>")[0].rpartition("<think>")[2].strip()
                lost |= {} if thought in text else {"a thought in the content": None}
                lost |= {_NESTED: None} if _nests_a_thought(message, text) else {}
            else:
                is_written = all(_stands_in(text, part) for part in _texts(content))
                lost |= {} if is_written else {f"content of the {role}": None}
                lost |= {f"a call of the {role}": None} if calls and "tool_calls" not in source else {}
            for key in (key for key in message if key not in (*_NOT_TEXT, "content", "tool_calls")):
                is_named = key in source and not (key in _THOUGHTS and number in turns)
                if not is_named and not (key in _THOUGHTS and _stands_beside(content, text, message[key])):
                    lost[key] = None
        if self.tools and "tools" not in source:
            lost["tools"] = None
        roles = dict.fromkeys(str(message["role"]) for message in self.messages)
        other = [f"{OTHER_ROLE} {role!r}" for role in roles if role not in _ROLES and role not in source]
        return (*(f"{NOT_WRITTEN} {what}" for what in lost), *other)


def _texts(content: Any) -> list[str]:
    """The texts of a message's content: itself, or those of its parts."""
    if isinstance(content, Mapping):
        return [text for key, value in content.items() if key not in _NOT_TEXT for text in _texts(value)]
    if isinstance(content, list | tuple):
        return [text for part in content for text in _texts(part)]
    return [content] if isinstance(content, str) else []


def _stands_in(whole: str, text: str) -> bool:
    """Whether a text is written as it is, without a thought before it, or inside of JSON."""
    forms = (text, text.rpartition("</think>")[2], _json_text([text.strip()])[2:-2])
    return any(form.strip() in whole for form in forms)


def _stands_beside(content: Any, text: str, thought: Any) -> bool:
    """Whether a thought is written beside a content, which may have the same words."""
    said, parts = "\n".join(_texts(content)), [part.strip() for part in _texts(thought)]
    return all(text.count(part) > said.count(part) for part in parts if part)


def _nests_a_thought(message: Message, text: str) -> bool:
    """Whether a template does not find the thought in a content, and writes another one before it."""
    num_inside = str(message.get("content") or "").count("</think>")
    return 0 < num_inside < text.count("</think>") - any(message.get(key) for key in _THOUGHTS)


def _has_system(messages: Messages) -> bool:
    """Whether a conversation begins with a system message and a question, both of text."""
    roles = tuple(message.get("role") for message in messages[:2])
    return roles == ("system", "user") and all(isinstance(message.get("content"), str) for message in messages[:2])


def shared_beginning(sequences: Sequence[Text]) -> Text:
    """The longest common beginning of sequences."""
    low, high = min(sequences), max(sequences)
    places = range(min(len(low), len(high)))
    return low[: next((i for i in places if low[i] != high[i]), len(places))]


_EMPTIES: tuple[Message, ...] = ({}, {"content": ""})


def _without_flags(message: Message, row_id: str) -> Message:
    """The message without empty keys and flags of loss."""
    kept = {key: value for key, value in message.items() if value is not None and key not in _FLAGS}
    calls = kept.get("tool_calls", [])
    if not isinstance(calls, list | tuple):
        kept["tool_calls"] = json_or_value(calls, list, f"Row {row_id}: 'tool_calls' must hold a list")
    for call in kept.get("tool_calls", ()):
        if isinstance(call, Mapping) and not isinstance(call.get("function") or {}, Mapping):
            raise DataError(
                f"Row {row_id}: 'function' of a tool call must hold an object with a name and arguments, but holds "
                f"{call['function']!r}."
            )
    return kept


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """The message with changed arguments of its tool calls."""

    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if call.get("arguments") is not None else dict(call)

    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}


def _arguments(message: Message) -> list[Any]:
    arguments: list[Any] = []
    _with_arguments(message, arguments.append)
    return arguments


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
