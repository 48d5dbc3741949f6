"""Turn rows into exact text and tokens, the same for calibration, training and scoring.

A row is one text, tokenised as a whole. Context and label are a split of its tokens: a token that holds any character
of the label belongs to the label, as in transformers' mask of the assistant's tokens. White space at the end of a plain
prompt moves to the completion, as in lm-evaluation-harness.
"""

from __future__ import annotations

import copy
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property
from typing import Any, Literal, TypeVar

from frozencore.errors import ConfigError, DataError, ModelError, NoRowsError
from frozencore.text import num_of
from frozencore.tune.rows import CONTROL, HALF_A_CHARACTER, ChoiceTokens, Example, TextRow, TokenRow
from frozencore.tune.rows.conversations import (
    ChatTemplate,
    Conversation,
    LossOn,
    Messages,
    added_tokens,
    shared_beginning,
    special_tokens,
    templates_of,
)

PromptStyle = Literal["auto", "chat", "plain"]
TooLong = Literal["refuse", "cut", "skip"]
Fit = Literal["whole", "cut", "too long"]
AnyText = Example | TextRow
OneText = TypeVar("OneText", Example, TextRow)
PROTOCOL_MAX_LENGTH = 512
PROMPT_DATE = date(2024, 7, 26)
"""The date that every chat template gets as today's: the default of Llama 3.1's and 3.2's own."""
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


class PromptEncoder:
    """Render and tokenise rows for one tokenizer.

    Args:
        style: ``chat`` uses the tokenizer's chat template, ``plain`` uses prompts unchanged; ``auto`` is ``chat`` if
            there is a template.
        max_length: The limit in tokens, including the end token; two at least.
        too_long: For longer rows, ``refuse`` and ``skip`` raise an error with their number (the caller leaves out the
            rows that do not fit, see :meth:`fits`); ``cut`` cuts the prompt at its beginning (at least one token
            stays), and a text without a prompt at its end. A completion is never cut; one that leaves no space for its
            prompt is an error.
        loss_on: The assistant's turns with loss: the last one, or all.

    Raises:
        ConfigError: ``chat`` without a template.
        ModelError: The tokenizer has no end token, or is a slow one, which does not say where its tokens stand.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        style: PromptStyle = "auto",
        max_length: int = PROTOCOL_MAX_LENGTH,
        too_long: TooLong = "refuse",
        loss_on: LossOn = "last",
    ) -> None:
        if style == "chat" and not tokenizer.chat_template:
            raise ConfigError(
                "The prompt style 'chat' needs a chat template, but this tokenizer has none. Use 'plain'."
            )
        if tokenizer.eos_token_id is None:
            raise ModelError("Training and scoring need an end token, but this tokenizer has none. Set eos_token.")
        if not tokenizer.is_fast:
            raise ModelError(
                f"Rows need a fast tokenizer, which says where each token stands, but {type(tokenizer).__name__} is a "
                "slow one. Save it with tokenizer.json, or use the model's fast tokenizer."
            )
        self.tokenizer = with_fixed_date(tokenizer)
        self.is_chat = style == "chat" or (style == "auto" and bool(tokenizer.chat_template))
        self.max_length = max_length
        self.too_long = too_long
        self.loss_on = loss_on
        self.systems: set[str] = set()  # the system texts of the rendered conversations; "" for none
        self.eos_id: int = tokenizer.eos_token_id
        self.pad_id = self.eos_id  # padding is masked, and a model may have no embedding of its tokenizer's own
        bare, full = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
        places = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        self._start_ids: list[int] = full[: next(places, 0)]  # the tokens that it puts before a text (<s>)

    @cached_property
    def _starts(self) -> tuple[str, ...]:
        return tuple(self.tokenizer.convert_ids_to_tokens(self._start_ids))

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        return special_tokens(self.tokenizer)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(map(self.tokenizer.convert_tokens_to_ids, added_tokens(self.tokenizer)))

    def render(self, example: AnyText, before: Messages = (), tools: Sequence[Any] | None = None) -> TextRow:
        """Render an example as text; an example without a prompt is plain text in either style.

        In chat style the completion is the content of the assistant's message. One space that only separates it from
        the prompt is removed. A row that is text already stays as it is.

        Args:
            before: The messages before the prompt in chat style.
            tools: The tools that the assistant may call.
        """
        if isinstance(example, TextRow):
            return example
        if self.is_chat and example.prompt:
            row = self._answered(example, example.completion, before, tools)
            wrong = {*example.choices} - {example.completion}
            others = {choice: self._answered(example, choice, before, tools) for choice in wrong}
            return replace(row, choices=tuple(others.get(choice, row).choices[0] for choice in example.choices))
        context = example.prompt.rstrip()
        space = example.prompt[len(context) :]
        choices = tuple(space + choice for choice in example.choices)
        return self._once(TextRow(example.id, context, space + example.completion, choices))

    def _answered(self, example: Example, answer: str, before: Messages, tools: Sequence[Any] | None) -> TextRow:
        """An example with one answer, which is its only choice."""
        if not answer.strip():
            raise DataError(f"Row {example.id}: a completion must hold at least one token, got {answer!r}.")
        answer = answer[1:] if answer[:1] == " " and not answer[1:2].isspace() else answer
        messages = [*before, {"role": "user", "content": example.prompt}, {"role": "assistant", "content": answer}]
        row = self.render_messages(messages, example.id, tools)
        suffix = self._template.suffix.rstrip()
        if not row.completion.endswith(suffix):
            raise DataError(
                f"Row {example.id}: the chat template ends this answer otherwise than others, so it has no place. "
                "Use --prompt-style plain."
            )
        return replace(row, choices=(row.completion.removesuffix(suffix),))

    def render_messages(
        self, messages: Messages, row_id: str, tools: Sequence[Any] | None = None, *, num_completion: int = 1
    ) -> TextRow:
        """Render a conversation that ends with the assistant's turn.

        Start and end tokens that messages hold at their ends are left to the template.

        Args:
            tools: The tools that the assistant may call, in the chat template's form.
            num_completion: The number of messages at the end that are the completion.
        """
        changed: dict[str, None] = {}
        begins_with = messages[0] if messages and messages[0].get("role") == "system" else {}
        self.systems.add(str(begins_with.get("content") or ""))
        ends = tuple(filter(None, map(self.tokenizer.convert_ids_to_tokens, self.end_ids)))
        starts = tuple(filter(None, (self.tokenizer.bos_token, *self._starts)))
        cleaned: list[Mapping[str, Any]] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                content, doubled = _without_tokens(content, starts, ends)
                changed |= dict.fromkeys((*map(_written_once, doubled), *self._control_tokens(content)))
                message = {**message, "content": content}
            cleaned.append(message)
        row = Conversation(self._template, cleaned, row_id, tools).row(self.loss_on, num_completion)
        return replace(row, changed=(*changed, *row.changed))

    def ask(self, messages: Messages, row_id: str) -> TextRow:
        """Render a conversation that ends with the prompt of the assistant's next turn."""
        talk = Conversation(self._template, messages, row_id)
        return TextRow(row_id, talk.prompt(len(talk.messages)), "", templated=True)

    def _control_tokens(self, text: str) -> list[str]:
        """A note for each special token that a text spells."""
        return [f"{CONTROL} {token} stands inside of a text" for token in self._special if token in text]

    def _once(self, row: TextRow) -> TextRow:
        """A plain row without the start and end tokens that every row gets."""
        if HALF_A_CHARACTER.search(_whole(row)):
            raise DataError(f"Row {row.id}: a row must hold text, but half a character of UTF-16 is in it.")
        context, starts = _without_tokens(row.context, self._starts, ())
        first = () if row.context else self._starts
        completion, ends = _without_tokens(row.completion, first, (self.tokenizer.eos_token,))
        changed = (*map(_written_once, starts + ends), *self._control_tokens(context + completion))
        return replace(row, context=context, completion=completion, changed=changed)

    def plain(self, row_id: str, text: str) -> TextRow:
        """Text without a prompt, with loss on all of it."""
        return self._once(TextRow(row_id, "", text))

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: the tokenizer's end token, and the first tokens after a chat's answers."""
        ends = {self._template.end, self._template.inner_end} - {None} if self.tokenizer.chat_template else ()
        return tuple(sorted({self.eos_id, *map(self.tokenizer.convert_tokens_to_ids, ends)}))

    def training_rows(self, rows: Sequence[AnyText]) -> list[TokenRow]:
        """The tokens of context, completion and end token.

        Raises:
            DataError: Rows are longer than the limit (unless prompts are cut), or a completion has no tokens.
        """
        texts, found = list(map(self.render, rows)), []
        encoded = self.whole_rows(texts)
        self._refuse_too_long(
            [(row.id, len(row.input_ids)) for row in encoded], "; --too-long skip leaves such rows out"
        )
        too_long = [
            (len(row.input_ids) - row.num_context, row.num_context, row.id)
            for text, row in zip(texts, encoded, strict=True)
            if self._fit(text, row, len(row.input_ids) - row.num_context) == "too long"
        ]
        if too_long:
            longest, num_context, row_id = max(too_long)
            raise DataError(
                f"A completion is not cut, but those of {num_of(len(too_long), 'row')} or more leave no room for their "
                f"prompts within the limit of {self.max_length} tokens (the longest, {row_id}, has {longest} after a "
                f"prompt of {num_context}). Raise the limit with --max-length, or leave them out (--too-long skip)."
            )
        for row in encoded:
            completion = row.input_ids[row.num_context :]
            room = max(len(self._start_ids), self.max_length - len(completion))
            context = self._cut_context(row.input_ids[: row.num_context], room)
            ids = (context + completion)[: self.max_length]
            found.append(replace(row, input_ids=ids, num_context=len(context)))
        return found

    def whole_rows(self, rows: Sequence[TextRow]) -> list[TokenRow]:
        """The tokens as in :meth:`training_rows`, for rows of any length."""
        cuts = []
        for row in rows:
            start, end = len(row.context), len(row.context) + len(row.completion)
            cuts.append([(start + first, start + stop) for first, stop in row.loss_spans] or [(start, end)])
        found: list[TokenRow] = []
        for row, (ids, spans, overlap) in zip(rows, self._split(list(map(_whole, rows)), cuts), strict=True):
            if any(first >= last for first, last in spans):
                unknown = " The tokenizer knows none of its characters." if row.completion.strip() else ""
                raise DataError(
                    f"Row {row.id}: a completion must hold at least one token, got {row.completion!r}.{unknown}"
                )
            before = [] if row.templated else self._start_ids
            start, stop = spans[0][0], spans[-1][1]
            ids = [*before, *ids[:stop], *([self.eos_id] if row.suffix is None else [])]
            inner = [(first - start, last - start) for first, last in spans[:-1]]
            inner += [(spans[-1][0] - start, len(ids) - len(before) - start)] if inner else []
            found.append(
                TokenRow(
                    row.id,
                    ids,
                    len(before) + start,
                    spans=tuple(inner),
                    overlap=overlap,
                    num_answer_spans=row.num_answer_spans if inner else 1,
                )
            )
        return found

    def fits(self, rows: Sequence[AnyText]) -> list[Fit]:
        """Say for each row, with its completion and every choice, whether it fits, fits if cut, or does not fit."""
        texts = list(map(self.render, rows))
        choices = iter(self._encoded_choices([row for row in texts if row.choices]))
        found: list[Fit] = []
        for row, tokens in zip(texts, self.whole_rows(texts), strict=True):
            lengths = map(len, next(choices).choice_ids if row.choices else ())
            longest = max(len(tokens.input_ids) - tokens.num_context, *lengths, 0)
            found.append(self._fit(row, tokens, longest))
        return found

    def drop_too_long(self, rows: Sequence[OneText]) -> tuple[tuple[OneText, ...], int]:
        """Return the rows that stay, all of them for ``refuse``, and the number of those whose prompt is cut.

        Raises:
            NoRowsError: No row is left.
        """
        if self.too_long == "refuse":
            return tuple(rows), 0
        fits = self.fits(rows)
        kept = tuple(row for row, fit in zip(rows, fits, strict=True) if fit != "too long")
        if rows and not kept:
            raise NoRowsError(
                f"--too-long left none of {len(rows)} rows: all are longer than {self.max_length} tokens. "
                "Raise the limit with --max-length."
            )
        return kept, fits.count("cut")

    def choice_rows(self, rows: Sequence[AnyText]) -> list[ChoiceTokens]:
        """The tokens of each context and of every choice, without end token.

        Raises:
            DataError: As in :meth:`training_rows`; or a row has no choices, an empty prompt, or no space for it.
        """
        encoded = self._encoded_choices(list(map(self.render, rows)))
        self._refuse_too_long([(row.id, row.num_tokens) for row in encoded])
        cut = []
        for row in encoded:
            longest = row.num_tokens - len(row.context_ids)
            room = self.max_length - longest
            if room < len(row.context_ids) and not self._holds_prompt(row.context_ids, room):
                raise DataError(
                    f"Row {row.id}: a choice of {longest} tokens leaves no room for its prompt within the limit of "
                    f"{self.max_length}. Raise the limit with --max-length, or leave the row out."
                )
            cut.append(replace(row, context_ids=self._cut_context(row.context_ids, room)))
        return cut

    def context_rows(self, rows: Sequence[AnyText]) -> list[list[int]]:
        """The tokens of each context, to generate from. Raises ``DataError`` for contexts beyond the limit."""
        contexts = self._contexts(list(map(self.render, rows)))
        self._refuse_too_long([(row.id, len(ids)) for row, ids in zip(rows, contexts, strict=True)])
        return [self._cut_context(ids, self.max_length) for ids in contexts]

    def count_too_long(self, rows: Sequence[AnyText]) -> int:
        """The number of rows scored with a cut prompt, because prompt and longest choice exceed the limit."""
        texts = list(map(self.render, rows))
        choices = [row.num_tokens for row in self._encoded_choices([row for row in texts if row.choices])]
        contexts = map(len, self._contexts([row for row in texts if not row.choices]))
        return sum(length > self.max_length for length in (*choices, *contexts))

    def _split(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[list[int], list[tuple[int, int]], str]]:
        """The tokens of each text, and its spans of characters as spans of the tokens that hold any of them.

        The third value is the text before the last span that the span's first token holds too; mostly it is empty.
        """
        if not texts:
            return []
        unique = list(dict.fromkeys(texts))
        found = self.tokenizer(unique, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        tokens_of = dict(zip(unique, zip(found["input_ids"], found["offset_mapping"], strict=True), strict=True))
        split = []
        for text, cuts in zip(texts, spans, strict=True):
            ids, places = tokens_of[text]
            starts, stops = zip(*places, strict=True) if places else ((), ())
            ends = {len(text): len(starts)} | {b: bisect_left(starts, b) for _, b in cuts if b < len(text)}
            firsts = {a: bisect_right(stops, a) for a, _ in cuts}
            for a, i in firsts.items():  # an added token may hold the white space behind it, and is not the label's
                firsts[a] += i < len(starts) and starts[i] < a and ids[i] in self._added
            parts = [(firsts[a], ends[b]) for a, b in cuts]
            (first, _), (begins, _) = parts[-1], cuts[-1]
            split.append((ids, parts, text[starts[first] : begins] if first < len(starts) else ""))
        return split

    def _contexts(self, rows: Sequence[TextRow]) -> list[list[int]]:
        texts = list(map(_whole, rows))
        split = self._split(texts, [[(len(row.context), len(_whole(row)))] for row in rows])
        starts = [[] if row.templated else self._start_ids for row in rows]
        return [[*start, *ids[: spans[0][0]]] for start, (ids, spans, _) in zip(starts, split, strict=True)]

    def _encoded_choices(self, rows: Sequence[TextRow]) -> list[ChoiceTokens]:
        for row in rows:
            if not row.choices or not row.context:
                raise DataError(
                    f"Row {row.id}: scoring by choice needs a prompt and choices, and one of them is empty."
                )
        flat = [(row, row.context + choice) for row in rows for choice in row.choices]
        cuts = [[(len(row.context), len(text))] for row, text in flat]
        split = iter(self._split([text for _, text in flat], cuts))
        encoded = []
        for row in rows:
            own = [next(split) for _ in row.choices]
            if any(spans[0][0] >= len(ids) for ids, spans, _ in own):
                raise DataError(f"Row {row.id}: a completion must hold at least one token, got {row.choices}.")
            # a token across the end of the prompt may differ between choices, and is scored with them
            common = shared_beginning([ids[: spans[0][0]] for ids, spans, _ in own])
            start = [] if row.templated else self._start_ids
            encoded.append(ChoiceTokens(row.id, [*start, *common], [ids[len(common) :] for ids, _, _ in own]))
        return encoded

    def _fit(self, text: TextRow, row: TokenRow, num_rest: int) -> Fit:
        room = self.max_length - num_rest
        if row.num_context <= room:
            return "whole"
        leaves_room = not text.context or self._holds_prompt(row.input_ids, room)
        return "cut" if self.too_long == "cut" and leaves_room else "too long"

    def _holds_prompt(self, ids: list[int], room: int) -> bool:
        """Whether so many tokens hold one of the prompt too, behind those that start the row."""
        return room > max(len(self._start_ids), len(self._start_of(ids)))

    def _refuse_too_long(self, lengths: Sequence[tuple[str, int]], further: str = "") -> None:
        too_long = [(length, row_id) for row_id, length in lengths if length > self.max_length]
        if too_long and self.too_long != "cut":
            longest, row_id = max(too_long)
            raise DataError(
                f"Rows are longer than the limit of {self.max_length} tokens: {num_of(len(too_long), 'row')} or more "
                f"(the longest, {row_id}, has {longest}). Raise the limit with --max-length, "
                f"or cut the beginning of long prompts with --too-long cut{further}."
            )

    def _cut_context(self, ids: list[int], room: int) -> list[int]:
        if len(ids) <= room:
            return ids
        start = self._start_of(ids)
        kept = max(0, room - len(start))
        return start + ids[len(ids) - kept :]

    def _start_of(self, ids: list[int]) -> list[int]:
        """The start tokens of a row: the tokenizer's, or the one that its chat template writes."""
        starts = (self._start_ids, [self.tokenizer.bos_token_id])
        return next((start for start in starts if start and ids[: len(start)] == start), [])


def _whole(row: TextRow) -> str:
    return row.context + row.completion + (row.suffix or "")


def _without_tokens(text: str, starts: Sequence[str], ends: Sequence[str]) -> tuple[str, list[str]]:
    """A text without these tokens at its beginning and at its end, and those that were there."""
    found: dict[str, None] = {}
    while token := next((token for token in starts if text.lstrip().startswith(token)), None):
        text = text.lstrip().removeprefix(token)
        found[token] = None
    while token := next((token for token in ends if text.rstrip().endswith(token)), None):
        text = text.rstrip().removesuffix(token)
        found[token] = None
    return text, list(found)


def _written_once(token: str) -> str:
    return f"{token} stood in a text where it is written anyway, and is written once"


LETTERS_OF_A_WORD = 5
FIRST_SYLLABLE = "\u1100"  # Hangul, kana and ideographs come after the alphabets
CONTEXT_NAMES = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length", "max_sequence_length",
    "seq_length", "context_length", "model_max_length", "max_target_positions",
)  # fmt: skip
"""The names of the longest context in the configurations of transformers' causal models, and in Bloom's files."""


def context_limit(model: Any, tokenizer: Any) -> int:
    """The largest number of tokens for the language model and its tokenizer; no stated limit is no limit."""
    config = model.config.get_text_config()
    stated = [getattr(config, name, None) for name in CONTEXT_NAMES]
    limits = [int(limit) for limit in (*stated, tokenizer.model_max_length) if isinstance(limit, int | float)]
    return min((limit for limit in limits if 0 < limit < 1e9), default=sys.maxsize)


def unknown_share(tokenizer: Any, rows: Sequence[TokenRow]) -> float:
    """The share of a text's letters that a tokenizer does not know: unknown tokens, and letters alone inside of words.

    Letters of scripts in which each is a syllable or a word are known alone.
    """
    letters = unknown = 0
    for row in rows:
        pieces = tokenizer.convert_ids_to_tokens(row.input_ids)
        for piece, after in zip(pieces, [*pieces[1:], " "], strict=True):
            word = piece.lstrip("Ġ▁")
            if piece == tokenizer.unk_token:
                letters, unknown = letters + LETTERS_OF_A_WORD, unknown + LETTERS_OF_A_WORD
            elif len(word) == 1 and word.isalpha() and word < FIRST_SYLLABLE:  # "a" is a word if no letter goes on
                letters += 1
                unknown += word == piece or (after[0].isalpha() and after[0] != "Ġ")
            else:
                letters += sum(map(str.isalpha, word))
    return unknown / letters if letters else 0.0


def with_fixed_date(tokenizer: Any) -> Any:
    """The tokenizer, or a copy whose chat templates write :data:`PROMPT_DATE` where they ask for today's date.

    With today's date, prompts would change from day to day, and with them moments, checkpoints and scores.
    """
    if not any(map(_CLOCK.search, templates_of(tokenizer))):
        return tokenizer
    dated, templates = copy.copy(tokenizer), tokenizer.chat_template
    dated.chat_template = (
        _dated(templates)
        if isinstance(templates, str)
        else {name: _dated(template) for name, template in templates.items()}
    )
    return dated


def _dated(template: str) -> str:
    return _CLOCK.sub(lambda call: repr(PROMPT_DATE.strftime(call[2])), template)
