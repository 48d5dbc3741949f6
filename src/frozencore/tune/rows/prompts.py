"""Encode rows: render them as exact text and tokenise each once, the same for calibration, training and scoring.

A row is one text, tokenised as a whole. Context and label are a split of its tokens: a token with any character
of the label belongs to the label, as in transformers' mask of the assistant's tokens. White space at the end of a plain
prompt moves to the completion, as in lm-evaluation-harness.
"""

from __future__ import annotations

import copy
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from frozencore.errors import DataError, ModelError, NoRowsError
from frozencore.text import num_of
from frozencore.tune.rows.chat_template import ChatTemplate, Messages, added_tokens, special_tokens, templates_of
from frozencore.tune.rows.conversations import Conversation, LossOn, RenderedRow, shared_beginning
from frozencore.tune.rows.row import CONTROL, ChoiceTokens, Row, TokenRow

PromptStyle = Literal["auto", "chat", "plain"]
TooLong = Literal["refuse", "cut", "skip"]
PROTOCOL_MAX_LENGTH = 512
PROMPT_DATE = date(2024, 7, 26)
"""The date that every chat template gets as today's; it is the default in the templates of Llama 3.1 and 3.2."""
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
SplitText = tuple[list[int], list[tuple[int, int]], str]
"""The tokens of a text, its spans in tokens, and the characters before the last span that its first token covers."""


class PromptEncoder:
    """Render and tokenise rows for one tokenizer.

    Args:
        style: ``chat`` uses the tokenizer's chat template, ``plain`` uses prompts unchanged; ``auto`` is ``chat`` if
            there is a template.
        max_length: The limit in tokens, including the end token; two at least. A row fits if its prompt fits with the
            completion and with each choice.
        too_long: For longer rows, ``refuse`` is an error with their number, and ``skip`` leaves them out. ``cut`` cuts
            the prompt at its beginning (at least one token stays), and a text without a prompt at its end; a completion
            is never cut, so a row whose completion leaves no space for its prompt is left out.
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
        if tokenizer.eos_token_id is None:
            raise ModelError("Training and scoring need an end token, but this tokenizer has none. Set eos_token.")
        if not tokenizer.is_fast:
            raise ModelError(
                f"Rows need a fast tokenizer, which says where each token stands, but {type(tokenizer).__name__} is a "
                "slow one. Save it with tokenizer.json, or use the model's fast tokenizer."
            )
        self.tokenizer = with_fixed_date(tokenizer)
        self.is_chat = style == "chat" or (style == "auto" and bool(tokenizer.chat_template))
        if self.is_chat:
            self._template = ChatTemplate(self.tokenizer)
        self.max_length = max_length
        self.too_long = too_long
        self.loss_on = loss_on
        self.eos_id: int = tokenizer.eos_token_id
        self.pad_id = self.eos_id  # padding is masked, and a model may have no embedding of the padding token
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

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: the tokenizer's end token, and the first tokens after a chat's answers."""
        ends = {self._template.end, self._template.inner_end} - {None} if self.tokenizer.chat_template else ()
        return tuple(sorted({self.eos_id, *map(self.tokenizer.convert_tokens_to_ids, ends)}))

    def render(self, row: Row) -> RenderedRow:
        """Write a row as exact text; a row without a prompt is plain text in either style.

        In chat style the completion is the content of the assistant's message. One space that only separates it from
        the prompt is removed.

        Raises:
            ConfigError: The row is a conversation, and the tokenizer has no chat template.
            DataError: The chat template does not write the row, or writes it so that the answer cannot be located.
        """
        if row.messages:
            return self._conversation(row.messages, row)
        if self.is_chat and row.prompt:
            rendered = self._answered(row, row.completion)
            others = {choice: self._answered(row, choice) for choice in {*row.choices} - {row.completion}}
            choices = tuple(self._without_end(others.get(choice, rendered)) for choice in row.choices)
            return replace(rendered, choices=choices, labels=row.choices, right=_right(row))
        context = row.prompt.rstrip()
        space = row.prompt[len(context) :]
        choices = tuple(space + choice for choice in row.choices)
        return self._once(
            RenderedRow(row.id, context, space + row.completion, choices=choices, labels=row.choices, right=_right(row))
        )

    def encode(self, rows: Sequence[Row | RenderedRow], *, too_long: TooLong | None = None) -> list[TokenRow]:
        """Rows as tokens, in order, each text tokenised once; rows that do not fit are left out, see the class.

        Args:
            too_long: Replaces the encoder's option.

        Raises:
            DataError: Rows are longer than the limit (``refuse``), or a completion or choice has no tokens.
            NoRowsError: No row is left.
        """
        texts = [row if isinstance(row, RenderedRow) else self.render(row) for row in rows]
        encoded, policy = self._tokens(texts), too_long or self.too_long
        long = [(row.longest, row.id) for row in encoded if row.longest > self.max_length]
        if long and policy == "refuse":
            longest, row_id = max(long)
            raise DataError(
                f"Rows are longer than the limit of {self.max_length} tokens: {num_of(len(long), 'row')} or more "
                f"(the longest, {row_id}, has {longest}). Raise the limit with --max-length, cut the beginning of long "
                "prompts with --too-long cut, or leave such rows out with --too-long skip."
            )
        fitted = [self._fitted(text, row, policy) for text, row in zip(texts, encoded, strict=True)]
        fitting = [row for row in fitted if row is not None]
        if rows and not fitting:
            raise NoRowsError(
                f"--too-long left none of {len(rows)} rows: all are longer than {self.max_length} tokens. "
                "Raise the limit with --max-length."
            )
        return fitting

    def ask(self, messages: Messages, row_id: str) -> tuple[list[int], int]:
        """The tokens to answer from, and the number of those that were cut from their beginning.

        They are a conversation with the prompt of the assistant's next turn; in plain style the last message alone.
        """
        if self.is_chat:
            talk = Conversation(self._template, messages, row_id)
            text, start = talk.prompt(len(talk.messages)), []
        else:
            text, start = messages[-1]["content"], self._start_ids
        ids = [*start, *self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        cut = self._cut_context(ids, self.max_length)
        return cut, len(ids) - len(cut)

    def _answered(self, row: Row, answer: str) -> RenderedRow:
        """A row with a prompt and this answer as a conversation."""
        if not answer.strip():
            raise _no_token(row.id, answer)
        answer = answer[1:] if answer[:1] == " " and not answer[1:2].isspace() else answer
        before = [{"role": "system", "content": row.system}] if row.system else []
        asked = [*before, {"role": "user", "content": row.prompt}, {"role": "assistant", "content": answer}]
        return self._conversation(asked, row)

    def _without_end(self, row: RenderedRow) -> str:
        """The completion of a rendered answer without what the chat template writes after it."""
        suffix = self._template.suffix.rstrip()
        if not row.completion.endswith(suffix):
            raise DataError(
                f"Row {row.id}: the chat template ends this answer otherwise than others, so it has no place. "
                "Use --prompt-style plain."
            )
        return row.completion.removesuffix(suffix)

    def _conversation(self, messages: Messages, row: Row) -> RenderedRow:
        """A conversation that ends with the assistant's turn.

        Start and end tokens at the ends of messages are removed: the template writes them.
        """
        changed: dict[str, None] = {}
        begins_with = messages[0] if messages[0].get("role") == "system" else {}
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
        rendered = Conversation(self._template, cleaned, row.id, row.tools).row(self.loss_on, row.num_completion)
        system = str(begins_with.get("content") or "")
        return replace(rendered, system=system, changed=(*changed, *rendered.changed))

    def _control_tokens(self, text: str) -> list[str]:
        """A note for each special token that a text spells."""
        return [f"{CONTROL} {token} stands inside of a text" for token in self._special if token in text]

    def _once(self, row: RenderedRow) -> RenderedRow:
        """A plain row without the start and end tokens that every row gets."""
        context, starts = _without_tokens(row.context, self._starts, ())
        first = () if row.context else self._starts
        completion, ends = _without_tokens(row.completion, first, (self.tokenizer.eos_token,))
        changed = (*map(_written_once, starts + ends), *self._control_tokens(context + completion))
        return replace(row, context=context, completion=completion, changed=changed)

    def _tokens(self, rows: Sequence[RenderedRow]) -> list[TokenRow]:
        """Rows of any length as tokens; one call of the tokenizer for all texts."""
        texts: list[str] = []
        cuts: list[list[tuple[int, int]]] = []
        for row in rows:
            start, end = len(row.context), len(row.context) + len(row.completion)
            texts.append(row.whole)
            cuts.append([(start + first, start + stop) for first, stop in row.loss_spans] or [(start, end)])
            for choice in row.choices:
                texts.append(row.context + choice)
                cuts.append([(start, start + len(choice))])
        split = self._split(texts, cuts)
        return [self._token_row(row, next(split), [next(split) for _ in row.choices]) for row in rows]

    def _token_row(self, row: RenderedRow, split: SplitText, choices: Sequence[SplitText]) -> TokenRow:
        ids, spans, overlap = split
        if any(first >= last for first, last in spans):
            raise _no_token(row.id, row.completion)
        before = [] if row.templated else self._start_ids
        start, stop = spans[0][0], spans[-1][1]
        ids = [*before, *ids[:stop], *([self.eos_id] if row.suffix is None else [])]
        inner = [(first - start, last - start) for first, last in spans[:-1]]
        inner += [(spans[-1][0] - start, len(ids) - len(before) - start)] if inner else []
        return TokenRow(
            row.id,
            ids,
            len(before) + start,
            spans=tuple(inner),
            overlap=overlap,
            num_answer_spans=row.num_answer_spans if inner else 1,
            choices=_choice_tokens(row, before, choices, self._end_of(row)) if choices else None,
            system=row.system,
            changed=row.changed,
        )

    def _end_of(self, row: RenderedRow) -> int:
        """The token that ends the completion of a row."""
        end = None if row.suffix is None else self._template.end
        return self.eos_id if end is None else int(self.tokenizer.convert_tokens_to_ids(end))

    def _split(self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]) -> Iterator[SplitText]:
        """The tokens of each text, and its spans of characters as spans of the tokens that cover them."""
        if not texts:
            return
        unique = list(dict.fromkeys(texts))
        encoding = self.tokenizer(unique, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        tokens_of = dict(zip(unique, zip(encoding["input_ids"], encoding["offset_mapping"], strict=True), strict=True))
        for text, cuts in zip(texts, spans, strict=True):
            ids, places = tokens_of[text]
            starts, stops = zip(*places, strict=True) if places else ((), ())
            ends = {len(text): len(starts)} | {b: bisect_left(starts, b) for _, b in cuts if b < len(text)}
            firsts = {a: bisect_right(stops, a) for a, _ in cuts}
            for a, i in firsts.items():  # an added token may include white space after it, and is no part of the label
                firsts[a] += i < len(starts) and starts[i] < a and ids[i] in self._added
            parts = [(firsts[a], ends[b]) for a, b in cuts]
            (first, _), (begins, _) = parts[-1], cuts[-1]
            yield ids, parts, text[starts[first] : begins] if first < len(starts) else ""

    def _fitted(self, text: RenderedRow, row: TokenRow, too_long: TooLong) -> TokenRow | None:
        """The row within the limit, with a shorter prompt if that may be cut; None if it does not fit."""
        if row.longest <= self.max_length or too_long != "cut":
            return row if row.longest <= self.max_length else None
        completion = row.input_ids[row.num_context :]
        longest = max(map(len, row.choices.choice_ids)) if row.choices else 0
        room = self.max_length - max(len(completion), longest)
        if not text.context:
            return replace(
                row, input_ids=row.input_ids[: self.max_length], num_cut=len(row.input_ids) - self.max_length
            )
        if room <= max(len(self._start_ids), len(self._start_of(row.input_ids))):  # a token of the prompt must stay
            return None
        context = self._cut_context(row.input_ids[: row.num_context], self.max_length - len(completion))
        cut, choices = row.num_context - len(context), row.choices
        if choices is not None:
            of_choices = self._cut_context(choices.context_ids, self.max_length - longest)
            cut = max(cut, len(choices.context_ids) - len(of_choices))
            choices = replace(choices, context_ids=of_choices)
        return replace(row, input_ids=context + completion, num_context=len(context), choices=choices, num_cut=cut)

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


def _choice_tokens(row: RenderedRow, before: list[int], choices: Sequence[SplitText], end: int) -> ChoiceTokens:
    for choice, (ids, spans, _) in zip(row.choices, choices, strict=True):
        if spans[0][0] >= len(ids):
            raise _no_token(row.id, choice)
    # a token across the end of the prompt may differ between choices, and is scored with them
    common = shared_beginning([ids[: spans[0][0]] for ids, spans, _ in choices])
    choice_ids = [ids[len(common) :] for ids, _, _ in choices]
    if not before and not common:
        raise DataError(
            f"Row {row.id}: a choice is scored by its likelihood after the prompt, but no token of {row.context!r:.60} "
            "stands before all choices. Begin the choices with a space, or give a longer prompt."
        )
    ordered = sorted(choice_ids)  # a choice stands right before those that it begins
    if any(longer[: len(shorter)] == shorter for shorter, longer in pairwise(ordered)):
        choice_ids = [[*ids, end] for ids in choice_ids]  # the longer one could never be the likelier one
    return ChoiceTokens(row.id, [*before, *common], choice_ids, labels=row.labels, right=row.right)


def _no_token(row_id: str, answer: str) -> DataError:
    unknown = " The tokenizer knows none of its characters." if answer.strip() else ""
    return DataError(f"Row {row_id}: a completion must hold at least one token, got {answer!r}.{unknown}")


def _right(row: Row) -> int:
    return row.choices.index(row.completion) if row.choices else 0


def _without_tokens(text: str, starts: Sequence[str], ends: Sequence[str]) -> tuple[str, list[str]]:
    """Remove the start tokens at the beginning of a text, and the end tokens at its end.

    Returns:
        The rest of the text, and the tokens that were removed.
    """
    tokens: dict[str, None] = {}
    while token := next((token for token in starts if text.lstrip().startswith(token)), None):
        text = text.lstrip().removeprefix(token)
        tokens[token] = None
    while token := next((token for token in ends if text.rstrip().endswith(token)), None):
        text = text.rstrip().removesuffix(token)
        tokens[token] = None
    return text, list(tokens)


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

    In scripts whose letters are syllables or words, a single letter counts as known.
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
