"""Greedy generation, and its score by number or by exact text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, TextStreamer

from frozencore.calibration.batches import rope_limit
from frozencore.errors import DataError
from frozencore.quiet import with_attributes
from frozencore.tune.rows import Example, TextRow, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder, context_limit
from frozencore.tune.rows.token_batches import pad, score_in_groups
from frozencore.tune.scoring import Prediction
from frozencore.tune.scoring.forward import RequireFinite, base_of, scoring_mode, vocabulary_of
from frozencore.tune.tasks.answers import parse_answer
from frozencore.words import Progress

SHORT = 16  # tokens of a completion, without its end token


@dataclass(frozen=True)
class Generation:
    """The text after a prompt, up to the end token or the length limit (``truncated``)."""

    text: str
    truncated: bool


def predict_numbers(
    model: nn.Module,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    *,
    max_new_tokens: int,
    progress: Progress | None = None,
) -> tuple[list[Prediction], int]:
    """Generate the answer to each example, in order, and count the answers that reached the length limit.

    Raises:
        DataError: An example's completion holds no answer, or its text cannot be encoded.
    """
    golds = []
    for example in examples:
        gold = parse_answer(example.completion, gold=True)
        if gold is None:
            raise DataError(f"Row {example.id}: the completion {example.completion!r} holds no marker with a number.")
        golds.append(gold)
    contexts = encoder.context_rows([encoder.render(example) for example in examples])
    found = generate_greedily(model, contexts, encoder=encoder, max_new_tokens=max_new_tokens, progress=progress)
    predictions = []
    for example, gold, generation in zip(examples, golds, found, strict=True):
        number = parse_answer(generation.text)
        spelled = None if number is None else str(number)
        predictions.append(Prediction(example.id, spelled, str(gold), number == gold, text=generation.text))
    return predictions, sum(generation.truncated for generation in found)


def are_short(rows: Sequence[TokenRow]) -> bool:
    """Return whether every completion is short enough for an exact comparison."""
    return all(len(row.input_ids) - row.answer_start - 1 <= SHORT for row in rows)


def complete(
    model: nn.Module,
    encoder: PromptEncoder,
    rows: Sequence[TokenRow],
    *,
    max_new_tokens: int,
    progress: Progress | None = None,
) -> tuple[list[Prediction], int]:
    """Complete each row, and count the completions that reached the length limit.

    A completion is right if it equals the row's own up to the first end token, except for surrounding white space; all
    other special tokens count. Rows without a prompt are continued from their first half. If the first token of a
    row's completion holds the end of its prompt too, that text is compared and left out of the prediction.
    """
    starts = [row.answer_start or max(1, len(row.input_ids) // 2) for row in rows]
    contexts = [row.input_ids[:start] for row, start in zip(rows, starts, strict=True)]
    found = generate_greedily(model, contexts, encoder=encoder, max_new_tokens=max_new_tokens, progress=progress)
    predictions = []
    end_ids = _end_tokens(base_of(model), encoder)
    for row, start, one in zip(rows, starts, found, strict=True):
        gold, said = _until_end(row.input_ids[start:], end_ids, encoder.tokenizer).text, one.text
        is_right = said.strip() == gold.strip() and not one.truncated
        said, gold = said.removeprefix(row.joined), gold.removeprefix(row.joined)
        predictions.append(Prediction(row.id, said.strip(), gold.strip(), is_right, text=said))
    return predictions, sum(one.truncated for one in found)


def generate_greedily(
    model: nn.Module,
    contexts: Sequence[list[int]],
    *,
    encoder: PromptEncoder,
    max_new_tokens: int,
    tokens_per_batch: int | None = None,
    progress: Progress | None = None,
) -> list[Generation]:
    """Generate greedily after each context, in batches of similar length, padded left.

    Of the model's own generation settings only the end tokens are used, because a chat model's repetition penalty would
    change greedy decoding. Generation ends at the end of the model's context. A row that reaches it is generated only
    with rows of its own length, so that no row's limit depends on another row. The same holds for a row that may cross
    the limit of LongRoPE, whose frequencies depend on the longest row.

    Raises:
        ModelError: Logits are not finite.
    """
    base, device = base_of(model), next(model.parameters()).device
    end_ids = _end_tokens(base, encoder)
    window = context_limit(base, encoder.tokenizer)
    limits = [max(1, min(max_new_tokens, window - len(context))) for context in contexts]
    rope = rope_limit(model) or math.inf
    crosses = [len(context) + limit > rope for limit, context in zip(limits, contexts, strict=True)]
    kinds = [(limits[i], len(context) if crosses[i] else 0) for i, context in enumerate(contexts)]
    generations: list[Generation | None] = [None] * len(contexts)
    sizes = [(len(context) + max_new_tokens, vocabulary_of(model)) for context in contexts]
    with scoring_mode(model), _greedy_settings(base, end_ids, encoder.pad_id):

        def score(group: list[int]) -> None:
            for (limit, _), rows in groupby(sorted(group, key=kinds.__getitem__), key=kinds.__getitem__):
                own = list(rows)
                tokens, mask = (t.to(device) for t in pad([contexts[i] for i in own], encoder.pad_id, side="left"))
                output = base.generate(
                    input_ids=tokens, attention_mask=mask, max_new_tokens=limit, logits_processor=[RequireFinite()]
                )
                for i, ids in zip(own, output[:, tokens.shape[1] :].tolist(), strict=True):
                    generations[i] = _until_end(ids, end_ids, encoder.tokenizer)

        score_in_groups(score, sizes, device, tokens_per_batch=tokens_per_batch, progress=progress)
    return [generation for generation in generations if generation is not None]


def stream_greedily(
    model: nn.Module,
    row: TextRow,
    encoder: PromptEncoder,
    *,
    max_new_tokens: int,
    tell: Callable[[str], None],
) -> None:
    """Generate the completion of one row and pass on its words as they come, without the end token.

    Raises:
        ModelError: Logits are not finite.
    """
    base, device = base_of(model), next(model.parameters()).device
    end_ids = _end_tokens(base, encoder)

    class Words(TextStreamer):
        def put(self, value: Tensor) -> None:
            if self.next_tokens_are_prompt or int(value.flatten()[-1]) not in end_ids:
                super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            tell(text)

    (context,) = encoder.context_rows([row])
    tokens, mask = (t.to(device) for t in pad([context], encoder.pad_id, side="left"))
    words = Words(encoder.tokenizer, skip_prompt=True)
    generating: Any = base
    with scoring_mode(model), _greedy_settings(base, end_ids, encoder.pad_id):
        generating.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=words,
            logits_processor=[RequireFinite()],
        )  # fmt: skip


def _until_end(ids: list[int], end_ids: list[int], tokenizer: Any) -> Generation:
    end = next((i for i, token in enumerate(ids) if token in end_ids), None)
    return Generation(tokenizer.decode(ids[:end]), truncated=end is None)


def _end_tokens(base: Any, encoder: PromptEncoder) -> list[int]:
    stated = base.generation_config.eos_token_id
    stated = [] if stated is None else [stated] if isinstance(stated, int) else list(stated)
    return sorted({*encoder.end_ids, *stated})


def _greedy_settings(base: Any, end_ids: list[int], pad_id: int) -> AbstractContextManager[None]:
    """Replace the model's generation settings inside, and restore them afterwards."""
    settings = GenerationConfig(do_sample=False, num_beams=1, eos_token_id=end_ids, pad_token_id=pad_id)
    return with_attributes(base, generation_config=settings)
