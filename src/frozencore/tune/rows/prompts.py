"""Turn rows into exact text and tokens, the same for calibration, training and scoring.

The boundary between prompt and completion follows lm-evaluation-harness: white space at the end of a plain prompt moves
to the completion, and both are tokenised together. If the tokenizer merges tokens across the boundary, the completion
is tokenised alone, because generation continues from the prompt's own tokens. The harness would score tokens that do
not spell the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import Any, Literal

from frozencore.errors import ConfigError, DataError, ModelError
from frozencore.tune.rows import ChoiceTokens, Example, PreferenceRow, TextRow, TokenRow, TurnsRow
from frozencore.tune.rows.conversations import Messages, every_turn, render_chat
from frozencore.tune.rows.prompt_date import PROMPT_DATE, with_fixed_date

PromptStyle = Literal["auto", "chat", "plain"]
TooLong = Literal["refuse", "truncate"]
LossOn = Literal["last", "all"]
Fit = Literal["whole", "cut", "too long"]
PROTOCOL_MAX_LENGTH = 512


class PromptEncoder:
    """Render and tokenise rows for one tokenizer.

    Args:
        style: ``chat`` uses the tokenizer's chat template, ``plain`` uses prompts unchanged; ``auto`` is ``chat`` if
            there is a template.
        max_length: The limit in tokens, including the end token.
        too_long: For longer rows, ``refuse`` raises an error with their number; ``truncate`` cuts the prompt at its
            beginning (at least one token stays), and a text without a prompt at its end. A completion is never cut;
            one that leaves no space for its prompt is an error.
        today: The date for a chat template that asks for it.
        loss_on: The assistant's turns with loss: the last one, or all.
        preferences: Rows are pairs of a chosen and a rejected answer.

    Raises:
        ConfigError: ``chat`` without a template, or a limit below two tokens.
        ModelError: The tokenizer has no end token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        style: PromptStyle = "auto",
        max_length: int = PROTOCOL_MAX_LENGTH,
        too_long: TooLong = "refuse",
        today: date = PROMPT_DATE,
        loss_on: LossOn = "last",
        preferences: bool = False,
    ) -> None:
        if style == "chat" and not tokenizer.chat_template:
            raise ConfigError(
                "The prompt style 'chat' needs a chat template, but this tokenizer has none. Use 'plain'."
            )
        if max_length < 2:
            raise ConfigError(f"A row needs room for two tokens, got max_length={max_length}.")
        if tokenizer.eos_token_id is None:
            raise ModelError("Training and scoring need an end token, but this tokenizer has none. Set eos_token.")
        self.tokenizer = with_fixed_date(tokenizer, today)
        self.is_chat = style == "chat" or (style == "auto" and bool(tokenizer.chat_template))
        self.max_length = max_length
        self.too_long = too_long
        self.loss_on = loss_on
        self.preferences = preferences
        self.eos_id: int = tokenizer.eos_token_id
        self.pad_id: int = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._start_ids = _start_tokens(tokenizer)

    def render(self, example: Example) -> TextRow:
        """Render an example as text; an example without a prompt is plain text in either style.

        In chat style the separating space of a completion is removed.
        """
        if self.is_chat and example.prompt:
            context: str = render_chat(self.tokenizer, [{"role": "user", "content": example.prompt}], example.id)
            choices = tuple(choice.lstrip() for choice in example.choices)
            return TextRow(example.id, context, example.completion.lstrip(), choices, templated=True)
        context = example.prompt.rstrip()
        space = example.prompt[len(context) :]
        choices = tuple(space + choice for choice in example.choices)
        return TextRow(example.id, context, space + example.completion, choices)

    def render_messages(self, messages: Messages, row_id: str, tools: Sequence[Any] | None = None) -> TextRow:
        """Render a conversation that ends with the assistant's turn, which is the completion.

        With ``loss_on="all"`` the completion begins at the assistant's first turn.

        Args:
            tools: The tools that the assistant may call, in the chat template's form.
        """
        if self.loss_on == "all":
            return every_turn(self.tokenizer, messages, row_id, tools)
        context = render_chat(self.tokenizer, messages[:-1], row_id, tools)
        return TextRow(row_id, context, messages[-1]["content"], templated=True)

    def training_rows(self, rows: Sequence[TextRow]) -> list[TokenRow]:
        """The tokens of context, completion and end token.

        Raises:
            DataError: Rows are longer than the limit (unless prompts are cut), or a completion has no tokens.
        """
        encoded = self.whole_rows(rows)
        self._refuse_too_long([(row.id, len(row.input_ids)) for row in encoded], "; --skip-long leaves such rows out")
        self._refuse_long_completions(rows, encoded)
        return [self._truncate_training(row) for row in encoded]

    def preference_rows(self, rows: Sequence[TextRow]) -> list[PreferenceRow]:
        """The tokens of context, chosen answer and rejected answer; the choices of a row are the two answers.

        Raises:
            DataError: As in :meth:`training_rows`, for either answer.
        """
        both = [self.training_rows([replace(row, completion=row.choices[side]) for row in rows]) for side in (0, 1)]
        found = []
        for chosen, rejected in zip(*both, strict=True):
            context = min((row.input_ids[: row.num_context] for row in (chosen, rejected)), key=len)  # both may be cut
            answers = (row.input_ids[row.num_context :] for row in (chosen, rejected))
            found.append(PreferenceRow(chosen.id, context + next(answers), len(context), next(answers)))
        return found

    def whole_rows(self, rows: Sequence[TextRow]) -> list[TokenRow]:
        """The tokens as in :meth:`training_rows`, for rows of any length."""
        pairs = self._pairs(rows, [row.turns[0] if row.turns else row.completion for row in rows])
        return [
            self._with_turns(row, context, completion)
            if len(row.turns) > 1
            else TokenRow(row.id, [*context, *completion, self.eos_id], len(context))
            for row, (context, completion) in zip(rows, pairs, strict=True)
        ]

    def _with_turns(self, row: TextRow, context: list[int], first: list[int]) -> TurnsRow:
        """Append the further pieces of a conversation, each as the tokens it adds to the preceding text."""
        ids, turns = [*context, *first], [(0, len(first))]
        text = row.context + row.turns[0]
        for number, piece in enumerate(row.turns[1:], start=1):
            text += piece
            start, (whole,) = len(ids), self._tokenise([text])
            ids = whole if whole[:start] == ids else ids + self._tokenise([piece])[0]
            if number % 2 == 0:
                turns.append((start - len(context), len(ids) - len(context)))
        turns[-1] = (turns[-1][0], turns[-1][1] + 1)
        return TurnsRow(row.id, [*ids, self.eos_id], len(context), tuple(turns))

    def fits(self, rows: Sequence[TextRow]) -> list[Fit]:
        """Say for each row, with its completion and every choice, whether it fits, fits if cut, or does not fit."""
        choices = iter(self._encoded_choices([row for row in rows if row.choices]))
        found: list[Fit] = []
        for row, tokens in zip(rows, self.whole_rows(rows), strict=True):
            num_completion = len(tokens.input_ids) - tokens.num_context
            lengths = map(len, next(choices).choice_ids if row.choices else ())
            rest = [num_completion, *(length + self.preferences for length in lengths)]  # an end token for each answer
            found.append(self._fit(bool(row.context), tokens.num_context, max(rest)))
        return found

    def choice_rows(self, rows: Sequence[TextRow]) -> list[ChoiceTokens]:
        """The tokens of each context and of every choice, without end token.

        Raises:
            DataError: As in :meth:`training_rows`; or a row has no choices, an empty prompt, or no space for it.
        """
        encoded = self._encoded_choices(rows)
        self._refuse_too_long([(row.id, _longest(row)) for row in encoded])
        return [replace(row, context_ids=self._cut_before_choices(row)) for row in encoded]

    def context_rows(self, rows: Sequence[TextRow]) -> list[list[int]]:
        """The tokens of each context, to generate from. Raises ``DataError`` for contexts beyond the limit."""
        contexts = self._contexts(rows)
        self._refuse_too_long([(row.id, len(ids)) for row, ids in zip(rows, contexts, strict=True)])
        return [self._cut_context(ids, self.max_length) for ids in contexts]

    def count_too_long(self, rows: Sequence[TextRow]) -> int:
        """The number of rows scored with a cut prompt, because prompt and longest choice exceed the limit."""
        choices = self._encoded_choices([row for row in rows if row.choices])
        contexts = self._contexts([row for row in rows if not row.choices])
        return sum(length > self.max_length for length in (*map(_longest, choices), *map(len, contexts)))

    def _tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        unique = list(dict.fromkeys(texts))  # choices share their prompt
        ids = self.tokenizer(unique, add_special_tokens=False, verbose=False)["input_ids"]
        of_text: dict[str, list[int]] = dict(zip(unique, ids, strict=True))
        return [of_text[text] for text in texts]

    def _contexts(self, rows: Sequence[TextRow]) -> list[list[int]]:
        encoded = self._tokenise([row.context for row in rows])
        return [ids if row.templated else self._start_ids + ids for row, ids in zip(rows, encoded, strict=True)]

    def _pairs(self, rows: Sequence[TextRow], completions: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        contexts = self._tokenise([row.context for row in rows])
        wholes = self._tokenise([row.context + text for row, text in zip(rows, completions, strict=True)])
        pairs = []
        for row, text, context, whole in zip(rows, completions, contexts, wholes, strict=True):
            joint = whole[: len(context)] == context
            completion = whole[len(context) :] if joint else self._tokenise([text])[0]
            if not completion:
                raise DataError(f"Row {row.id}: a completion must hold at least one token, got {text!r}.")
            pairs.append((context if row.templated else self._start_ids + context, completion))
        return pairs

    def _encoded_choices(self, rows: Sequence[TextRow]) -> list[ChoiceTokens]:
        for row in rows:
            if not row.choices or not row.context:
                raise DataError(
                    f"Row {row.id}: scoring by choice needs a prompt and choices, and one of them is empty."
                )
        pairs = iter(self._pairs([row for row in rows for _ in row.choices], [c for row in rows for c in row.choices]))
        encoded = []
        for row in rows:
            own = [next(pairs) for _ in row.choices]
            encoded.append(ChoiceTokens(row.id, own[0][0], [choice for _, choice in own]))
        return encoded

    def _fit(self, has_prompt: bool, num_context: int, num_rest: int) -> Fit:
        room = self.max_length - num_rest
        if num_context <= room:
            return "whole"
        leaves_room = room > len(self._start_ids) or not has_prompt
        return "cut" if self.too_long == "truncate" and leaves_room else "too long"

    def _refuse_long_completions(self, rows: Sequence[TextRow], encoded: Sequence[TokenRow]) -> None:
        too_long = [
            (len(row.input_ids) - row.num_context, row.num_context, row.id)
            for text, row in zip(rows, encoded, strict=True)
            if self._fit(bool(text.context), row.num_context, len(row.input_ids) - row.num_context) == "too long"
        ]
        if too_long:
            longest, num_context, row_id = max(too_long)
            raise DataError(
                f"A completion is not cut, but those of {len(too_long)} of {len(rows)} rows leave no room for their "
                f"prompts within the limit of {self.max_length} tokens (the longest, {row_id}, has {longest} after a "
                f"prompt of {num_context}). Raise the limit with --max-length, or leave such rows out with --skip-long."
            )

    def _refuse_too_long(self, lengths: Sequence[tuple[str, int]], further: str = "") -> None:
        too_long = [(length, row_id) for row_id, length in lengths if length > self.max_length]
        if too_long and self.too_long == "refuse":
            longest, row_id = max(too_long)
            raise DataError(
                f"{len(too_long)} of {len(lengths)} rows are longer than the limit of {self.max_length} tokens "
                f"(the longest, {row_id}, has {longest}). Raise the limit with --max-length, "
                f"or cut the beginning of long prompts with --truncate{further}."
            )

    def _truncate_training(self, row: TokenRow) -> TokenRow:
        context, completion = row.input_ids[: row.num_context], row.input_ids[row.num_context :]
        context = self._cut_context(context, max(len(self._start_ids), self.max_length - len(completion)))
        return replace(row, input_ids=(context + completion)[: self.max_length], num_context=len(context))

    def _cut_before_choices(self, row: ChoiceTokens) -> list[int]:
        longest = max(map(len, row.choice_ids))
        room = self.max_length - longest
        if room <= len(self._start_ids) and room < len(row.context_ids):
            raise DataError(
                f"Row {row.id}: a choice of {longest} tokens leaves no room for its prompt within the limit of "
                f"{self.max_length}. Raise the limit with --max-length, or leave the row out."
            )
        return self._cut_context(row.context_ids, room)

    def _cut_context(self, ids: list[int], room: int) -> list[int]:
        if len(ids) <= room:
            return ids
        start = self._start_ids if ids[: len(self._start_ids)] == self._start_ids else []
        kept = max(0, room - len(start))
        return start + ids[len(ids) - kept :]


def _longest(row: ChoiceTokens) -> int:
    return len(row.context_ids) + max(map(len, row.choice_ids))


def context_limit(model: Any, tokenizer: Any) -> int:
    """The largest number of tokens for model and tokenizer; 512 if neither has a limit."""
    stated = [getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length]
    limits = [int(limit) for limit in stated if isinstance(limit, int | float) and 0 < limit < 1e9]
    return min(limits, default=PROTOCOL_MAX_LENGTH)


def _start_tokens(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before a text (``<s>``)."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    return next((full[:i] for i in range(len(full)) if full[i : i + len(bare)] == bare), [])
