"""Render conversations with the chat template, and find the assistant's turns, which carry the loss.

The template writes a conversation once, as a whole; a turn is a span of that text. A template may mark the spans itself
(``{% generation %}``). Otherwise a turn begins where the prompt of its answer ends, and ends where the template ends
the conversation up to it. A template may write a turn differently if other turns follow (earlier reasoning is dropped,
the prompt opens a thought). Then the turn is found by writing two other answers in its place: what stays the same
before and after them is not the answer. A row whose turn cannot be found exactly is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, TypeVar

from frozencore.errors import ConfigError, DataError
from frozencore.tune.rows import HALF_A_CHARACTER, NOT_WRITTEN, TextRow
from frozencore.tune.rows.row_sources import strict_json

Message = Mapping[str, Any]
Messages = Sequence[Message]
LossOn = Literal["last", "all"]
Span = tuple[int, int]
Text = TypeVar("Text", str, list[int])
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHT = re.compile(r"(?:</?think>\s*)+$")
_FLAGS = ("weight", "train")
_NOT_TEXT = ("role", "type", "id", "tool_call_id")  # a template may take these in one form only


def templates_of(tokenizer: Any) -> Collection[str]:
    """The chat templates of a tokenizer, which may have several."""
    templates = tokenizer.chat_template or ""
    return templates.values() if isinstance(templates, dict) else [templates]


class Conversation:
    """Messages in the form that the tokenizer's chat template takes.

    Arguments of tool calls that are JSON text become objects. If a template refuses a message without content, it gets
    empty content. If it refuses arguments that are objects, or writes them as Python does, it gets JSON text: the text
    as given, if it was text.

    Args:
        messages: Each has a role and a content; ``weight`` 0 or ``train`` false takes the loss from the assistant's
            message.
        tools: The tools that the assistant may call.

    Raises:
        ConfigError: The tokenizer has no chat template.
        DataError: The template refuses the messages.
    """

    def __init__(self, tokenizer: Any, messages: Messages, row_id: str, tools: Sequence[Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "Chat messages need a chat template, but this tokenizer has none. Use prompt/completion rows."
            )
        self.tokenizer, self.row_id, self.tools = tokenizer, row_id, tools
        self._tokens = added_tokens(tokenizer)
        self.has_loss = [self._flag(message) for message in messages]
        told = [_without_flags(message, row_id) for message in messages]
        given = [_with_arguments(message, lambda value: _object(value, row_id)) for message in told]
        forms: list[list[Message]] = [given]
        if any(message.get("tool_calls") for message in told):
            as_text = [_with_arguments(message, _json_text) for message in told]
            forms = [[{**empty, **message} for message in form] for form in (given, as_text) for empty in _EMPTIES]
        objects = [found for message in given for found in _arguments(message) if found]
        for form in forms:
            self.messages = form
            with suppress(DataError):
                text = self.prompt(len(form))
                if form is forms[-1] or not any(str(found) in text for found in objects):
                    return
        self.messages = given
        self.prompt(len(given))  # raises the template's reason for the messages as they are

    def prompt(self, count: int) -> str:
        """The text of the first messages, and of the prompt of the assistant's next turn."""
        return self._write(self.messages[:count], asks=True)[0]

    def row(self, loss_on: LossOn = "last") -> tuple[TextRow, int]:
        """The conversation as a row: the loss is on the assistant's last turn, or on all its turns.

        Returns:
            The row, and the end of the content of its last turn in its completion; 0 without content.

        Raises:
            DataError: A turn cannot be found, or no turn has loss.
        """
        asked = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        last = asked[-1]
        wanted = [number for number in (asked if loss_on == "all" else [last]) if self.has_loss[number]]
        if not wanted:
            raise DataError(f"Row {self.row_id}: no turn to learn is left, as messages have weight 0 or train false.")
        if _MARKS.search(self._template):
            whole, turns = self._marked(asked)
        else:
            whole, _ = self._write(self.messages)
            turns = {number: [self._turn(number, whole)] for number in wanted}
        spans: list[Span] = []
        content_end = None  # of the last turn with loss
        for number in wanted:
            content_end = self._end_of_content(number, whole, turns[number])
            self._require_written(number, "".join(whole[start:stop] for start, stop in turns[number]), content_end)
            for start, stop in turns[number]:
                joined = bool(spans) and spans[-1][1] == start
                spans[-1:] = [(spans[-1][0], stop)] if joined else [*spans[-1:], (start, stop)]
        if not spans:
            raise DataError(f"Row {self.row_id}: the chat template writes nothing of the assistant's turns.")
        start, stop, begin = spans[0][0], spans[-1][1], turns[wanted[-1]][0][0]
        behind = whole[begin if content_end is None else content_end : stop].rstrip()
        ended = behind.endswith(self._ends(wanted[-1]))  # else generation could not stop there
        relative = tuple((first - start, end - start) for first, end in spans)
        row = TextRow(
            self.row_id,
            whole[:start],
            whole[start:stop],
            templated=True,
            turns=relative if loss_on == "all" or len(relative) > 1 else (),
            pieces=sum(end > begin for _, end in spans),
            rest=whole[stop:] if ended else "",
            ended=ended,
            changed=self._left_out(whole, {number: turns[number] for number in wanted}),
        )
        return row, 0 if content_end is None else content_end - start

    @property
    def _template(self) -> str:
        template: str = self.tokenizer.get_chat_template(None, self.tools)
        return template

    def _write(self, messages: Messages, *, asks: bool = False, marked: bool = False) -> tuple[str, list[Span]]:
        """The template's text, and the spans that it marks."""
        if not messages:
            return "", []
        special, options = self.tokenizer.special_tokens_map, {"add_generation_prompt": asks}
        try:
            text, marks = _render(
                self._template, special, self.tools, messages, return_assistant_tokens_mask=marked, **options
            )
        except Exception as error:  # templates are programs and may raise any error
            raise DataError(f"Row {self.row_id}: the tokenizer's chat template refuses it: {error}") from error
        if HALF_A_CHARACTER.search(text):
            raise DataError(f"Row {self.row_id}: a message must hold text, but half a character of UTF-16 is in it.")
        return text, marks

    def _flag(self, message: Message) -> bool:
        given = [message.get(name) for name in _FLAGS if message.get(name) is not None]
        if any(not isinstance(value, int | float) or value not in (0, 1) for value in given):
            raise DataError(
                f"Row {self.row_id}: a message's weight must be 0 or 1 and its train a truth value, got {given}."
            )
        return all(given)

    def _marked(self, asked: Sequence[int]) -> tuple[str, dict[int, list[Span]]]:
        """The whole text, and for each of the assistant's messages the spans that the template marks."""
        whole, marks = self._write(self.messages, marked=True)
        if not any(stop > start for start, stop in marks):
            raise DataError(f"Row {self.row_id}: the chat template marks none of the assistant's turns.")
        if len(marks) == len(asked):
            turns = {number: [mark] for number, mark in zip(asked, marks, strict=True)}
        else:  # a turn may have several marks: they end after the prompt of its answer
            begins = {number: len(shared_beginning([self.prompt(number), whole])) for number in asked}
            turns = {number: [] for number in asked}
            for mark in marks:
                owners = [number for number in asked if begins[number] < mark[1]]
                turns[owners[-1] if owners else asked[0]].append(mark)
        turns = {number: [(start, stop) for start, stop in spans if stop > start] for number, spans in turns.items()}
        behind = whole[turns[asked[-1]][-1][1] :] if turns[asked[-1]] else ""
        end = self.first_token(behind)  # a turn's end behind the mark: generation needs it
        for spans in turns.values():
            if end and spans and whole[spans[-1][1] :].lstrip().startswith(end):
                stop = whole.index(end, spans[-1][1]) + len(end)
                spans[-1] = (spans[-1][0], stop)
        return whole, turns

    def _turn(self, number: int, whole: str) -> Span:
        prompt, is_last = self.prompt(number), number == len(self.messages) - 1
        turn = whole if is_last else self._write(self.messages[: number + 1])[0]
        content = self.messages[number].get("content") or ""  # without the white space that the template writes
        stop = max(len(turn.rstrip()), turn.rfind(content) + len(content) if content.strip() else 0)
        if not whole.startswith(prompt):
            prompt = _THOUGHT.sub("", prompt)  # that the prompt opens or closes, and the template does not write
        begins, ends = number > 0 and whole.startswith(prompt), whole.startswith(turn[:stop])
        if begins and ends and len(prompt) < stop:
            return len(prompt), stop
        before, after = self._around(self.messages, number)
        short_before, short_after = self._around(self.messages[: number + 1], number)
        start = self._start(number, prompt, before, short_before)
        start = len(prompt) if begins else start
        end = len(whole) - len(after)
        if start is None or not whole.startswith(before[:start]) or not whole.endswith(after):
            raise self._lost(number)
        if is_last:
            return start, stop
        length = self._length_of_end(after, short_after)
        if length is None or end + length <= start:
            raise self._lost(number)
        return start, end + length

    def _around(self, messages: Messages, number: int) -> tuple[str, str]:
        """What the template writes before and after the content of a message, whatever the content is."""
        texts = []
        for content in "AB":
            changed = [*messages[:number], {**messages[number], "content": content}, *messages[number + 1 :]]
            texts.append(self._write(changed)[0])
        if texts[0] == texts[1]:
            raise self._lost(number)
        before, after = shared_beginning(texts), shared_beginning([text[::-1] for text in texts])[::-1]
        return before, after

    def _start(self, number: int, prompt: str, before: str, short_before: str) -> int | None:
        """The place in the whole text that the prompt of the answer leads to; None if it is unknown."""
        place = number or len(self.messages) - 1
        asked, said = self.prompt(place), self._write(self.messages[:place])[0]
        asked = asked.removeprefix(said) if asked.startswith(said) else ""  # else the prompt does not follow
        for header in (asked, _THOUGHT.sub("", asked)):
            if header and header in before:
                return before.rindex(header) + len(header)
        if number and prompt.startswith(short_before):  # what the prompt opens, the template does not write
            return len(before)
        if not number or not short_before.startswith(prompt):
            return None
        written = short_before[len(prompt) :]  # by the template, at the beginning of every answer
        return len(before) - len(written) * before.endswith(written)

    def _length_of_end(self, after: str, short_after: str) -> int | None:
        """The length of a turn's end, if other messages follow; None if it is unknown.

        The last turn of a conversation may end with another token, or with one more.
        """
        common = shared_beginning([after, short_after])
        if common == short_after:
            return len(common.rstrip())
        places = range(len(common), -1, -1)
        tails = ((place, after[place:], short_after[place:]) for place in places)
        place = next((at for at, *both in tails if all(tail.startswith(self._tokens) for tail in both)), None)
        if place is None:
            return None
        same = after[:place].rstrip()
        return len(same) if same.endswith(self._tokens) else place + len(self.first_token(after[place:]) or "")

    def _require_written(self, number: int, said: str, content_end: int | None) -> None:
        message = self.messages[number]
        calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
        names = [str((call.get("function") or call).get("name")) for call in calls]
        lost = [name for name in names if name not in said]
        if lost or (content_end is None and (message.get("content") or "").strip()):
            what = f"the call of {lost[0]!r}" if lost else "the content"
            raise DataError(
                f"Row {self.row_id}: the chat template does not write {what} of turn {number + 1}, the assistant's."
            )

    def _end_of_content(self, number: int, whole: str, turn: Sequence[Span]) -> int | None:
        """The place in the whole text where a message's content ends; None if the template does not write it."""
        if not turn:
            return None
        content, begin = self.messages[number].get("content") or "", turn[0][0]
        said = whole[begin : turn[-1][1]]
        for written in (content, content.strip(), content.rpartition("</think>")[2].strip()):
            if not written or written not in said:
                continue
            if said.find(written) == said.rfind(written):
                return begin + said.index(written) + len(written)
            try:  # the same letters stand in the turn's end, or in a call
                return len(self._write(self.messages)[0]) - len(self._around(self.messages, number)[1])
            except DataError:
                return None
        return None

    def _ends(self, number: int) -> tuple[str, ...]:
        """The tokens at which generation stops after a turn.

        Any added token ends a text. A call may be written in added tokens, so only a special one ends it, and only if
        the template ends texts too; in GLM's the next turn's first token is the end.
        """
        if not self.messages[number].get("tool_calls"):
            return self._tokens
        with_text, behind = [*self.messages[:number], {"role": "assistant", "content": "A"}], ""
        with suppress(DataError):
            _, behind = self._around(with_text, number)
        own_end = self.first_token(behind)
        if own_end is None:
            return (self.tokenizer.eos_token,)
        special = (str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        return (self.tokenizer.eos_token, own_end, *special)

    def _left_out(self, whole: str, turns: Mapping[int, Sequence[Span]]) -> tuple[str, ...]:
        """What the template does not write of a conversation whose turns with loss it writes.

        Every text is replaced by a mark of its own, and the marks are looked for in what the template writes then.
        Earlier thoughts, which have no loss, may be missing.
        """
        marked, places = _with_marks(self.messages)
        special, messages = _json_text(self.tokenizer.special_tokens_map), _json_text(marked)
        text = _rendered(self._template, special, _json_text(self.tools), messages)
        if text is None:
            return ()
        written = {place for mark, place in places.items() if mark in text}
        lost: dict[str, None] = {}
        for number, key, _ in (place for place in dict.fromkeys(places.values()) if place not in written):
            role = self.messages[number]["role"]
            if key == "tool_calls" or key == "content":
                lost[f"{'a call' if key == 'tool_calls' else 'content'} of the {role}"] = None
            elif role != "assistant" or number in turns:
                lost[key] = None
        for number, spans in turns.items():
            thought = str(self.messages[number].get("content") or "").rpartition("</think>")[0].rpartition("<think>")[2]
            if thought.strip() and thought.strip() not in "".join(whole[start:stop] for start, stop in spans):
                lost["a thought in the content"] = None
        if self.tools and text == _rendered(self._template, special, "null", messages):
            lost["tools"] = None
        return tuple(f"{NOT_WRITTEN} {what}" for what in lost)

    def first_token(self, text: str) -> str | None:
        """The added token that a text begins with, after white space."""
        found = [token for token in self._tokens if text.lstrip().startswith(token)]
        return max(found, key=len, default=None)

    def _lost(self, number: int) -> DataError:
        return DataError(
            f"Row {self.row_id}: the chat template writes turn {number + 1}, the assistant's, otherwise than after its "
            "prompt, so the tokens with loss cannot be placed. "
            + ("Leave it out." if number == len(self.messages) - 1 else "Use --loss-on last.")
        )


def shared_beginning(sequences: Sequence[Text]) -> Text:
    """The longest beginning that all sequences have."""
    low, high = min(sequences), max(sequences)
    places = range(min(len(low), len(high)))
    return low[: next((i for i in places if low[i] != high[i]), len(places))]


def added_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The texts of special tokens and of tokens added to the vocabulary, which no other token can be merged with."""
    tokens = dict.fromkeys((*map(str, tokenizer.all_special_tokens), *tokenizer.get_added_vocab()))
    return tuple(token for token in tokens if token.strip())


_EMPTIES: tuple[Message, ...] = ({}, {"content": ""})


def _without_flags(message: Message, row_id: str) -> Message:
    """The message without empty keys and flags of loss."""
    kept = {key: value for key, value in message.items() if value is not None and key not in _FLAGS}
    if not isinstance(kept.get("tool_calls", []), list | tuple):
        raise DataError(f"Row {row_id}: 'tool_calls' must hold a list, but {kept['tool_calls']!r:.60} came.")
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
    found: list[Any] = []
    _with_arguments(message, found.append)
    return found


def _object(given: Any, row_id: str) -> Any:
    rule = f"Row {row_id}: 'arguments' of a tool call must hold an object, or that as JSON"
    try:
        found = strict_json(given or "{}") if isinstance(given, str) else given
        json.dumps(found, allow_nan=False, default=str)  # a template would write NaN, which JSON has not
    except (ValueError, RecursionError) as error:
        raise DataError(f"{rule}: {error}.") from error
    if not isinstance(found, Mapping):
        raise DataError(f"{rule}, but {given!r:.60} came.")
    return found


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


TextPlace = tuple[int, str, int]
"""The number of a message, its key, and the number within the key's list."""


def _with_marks(messages: Messages) -> tuple[Messages, dict[str, TextPlace]]:
    """The messages with a mark in place of every text, and where each mark stands."""
    places: dict[str, TextPlace] = {}

    def marked(value: Any, place: TextPlace) -> Any:
        if isinstance(value, Mapping):
            return {key: item if key in _NOT_TEXT else marked(item, place) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [marked(item, place) for item in value]
        if not isinstance(value, str) or not value.strip():
            return value
        mark = f"qx{len(places)}xq"
        places[mark] = place
        return mark

    found = []
    for number, message in enumerate(messages):
        changed: dict[str, Any] = {}
        for key, value in message.items():
            if key in _NOT_TEXT:
                changed[key] = value
            elif isinstance(value, list | tuple):
                changed[key] = [marked(item, (number, key, i)) for i, item in enumerate(value)]
            else:
                changed[key] = marked(value, (number, key, 0))
        found.append(changed)
    return found, places


@lru_cache(maxsize=1024)
def _rendered(template: str, special_tokens: str, tools: str, messages: str) -> str | None:
    """The template's text for arguments in JSON; None if it refuses them."""
    try:
        return _render(template, json.loads(special_tokens), json.loads(tools), json.loads(messages))[0]
    except Exception:  # templates are programs and may raise any error
        return None


def _render(
    template: str, special_tokens: Mapping[str, Any], tools: Any, messages: Messages, **options: Any
) -> tuple[str, list[Span]]:
    """The template's text and the spans that it marks, for one conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template  # the import takes a second

    texts, marks = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=template, **options, **special_tokens
    )
    return texts[0], [tuple(mark) for mark in marks[0]] if marks else []
