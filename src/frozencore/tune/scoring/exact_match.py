"""Greedy generation, and its score by number or by exact text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, TextStreamer

from frozencore.attributes import with_attributes
from frozencore.calibration.batches import stated_ids
from frozencore.errors import DataError, ModelError
from frozencore.progress import Progress, no_progress
from frozencore.tune.rows.prompts import PromptEncoder, context_limit
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import pad, score_in_groups
from frozencore.tune.scoring.answers import parse_answer
from frozencore.tune.scoring.forward import NOT_FINITE, Prediction, forward_accepts, scoring_mode, vocabulary_of
from frozencore.unwrapped_model import base_of

SHORT = 16  # tokens of a completion, without its end token


@dataclass(frozen=True)
class Generation:
    """The text after a prompt, up to the end token or the length limit (``truncated``)."""

    text: str
    truncated: bool


def predict_numbers(
    model: nn.Module,
    encoder: PromptEncoder,
    rows: Sequence[TokenRow],
    *,
    max_new_tokens: int,
    progress: Progress = no_progress,
) -> tuple[list[Prediction], int]:
    """Generate the answer to each row, in order, and count the answers that reached the length limit.

    Raises:
        DataError: A row's completion holds no answer.
    """
    golds = []
    for row in rows:
        text = encoder.tokenizer.decode(row.input_ids[row.answer_start :])
        if (gold := parse_answer(text, gold=True)) is None:
            raise DataError(f"Row {row.id}: the completion {text!r} holds no marker with a number.")
        golds.append(gold)
    contexts = [row.input_ids[: row.answer_start] for row in rows]
    answers = generate_greedily(model, contexts, encoder=encoder, max_new_tokens=max_new_tokens, progress=progress)
    predictions = []
    for row, gold, generation in zip(rows, golds, answers, strict=True):
        number = parse_answer(generation.text)
        spelled = None if number is None else str(number)
        predictions.append(Prediction(row.id, spelled, str(gold), number == gold, text=generation.text))
    return predictions, sum(generation.truncated for generation in answers)


def are_short(rows: Sequence[TokenRow]) -> bool:
    """Return whether every completion is short enough for an exact comparison."""
    return all(len(row.input_ids) - row.answer_start - 1 <= SHORT for row in rows)


def complete(
    model: nn.Module,
    encoder: PromptEncoder,
    rows: Sequence[TokenRow],
    *,
    max_new_tokens: int,
    progress: Progress = no_progress,
) -> tuple[list[Prediction], int]:
    """Complete each row, and count the completions that reached the length limit.

    A completion is right if it equals the row's without its end tokens, except for surrounding white space; all other
    special tokens count. Rows without a prompt are continued from their first half. If the first token of a
    row's completion covers the end of its prompt too, that text is compared and left out of the prediction.
    """
    contexts = [row.input_ids[: row.prompt_end] for row in rows]
    answers = generate_greedily(model, contexts, encoder=encoder, max_new_tokens=max_new_tokens, progress=progress)
    predictions = []
    end_ids = _end_tokens(model, encoder)
    for row, one in zip(rows, answers, strict=True):
        ids = row.input_ids[row.prompt_end :]
        while ids and ids[-1] in end_ids:  # an end token inside of the text is a part of it
            ids.pop()
        gold, answer = encoder.tokenizer.decode(ids), one.text
        is_right = answer.strip() == gold.strip() and not one.truncated
        answer, gold = answer.removeprefix(row.overlap), gold.removeprefix(row.overlap)
        predictions.append(Prediction(row.id, answer.strip(), gold.strip(), is_right, text=answer))
    return predictions, sum(one.truncated for one in answers)


def generate_greedily(
    model: nn.Module,
    contexts: Sequence[list[int]],
    *,
    encoder: PromptEncoder,
    max_new_tokens: int,
    progress: Progress = no_progress,
) -> list[Generation]:
    """Generate greedily after each context, in batches of similar length.

    Generation ends at the end of the model's context. Rows of one batch have the same limit, so that no row's limit
    depends on another row; and one length if the model cannot be told their positions, as it may count padding.

    Raises:
        ModelError: Logits are not finite.
    """
    end_ids = _end_tokens(model, encoder)
    window = context_limit(base_of(model), encoder.tokenizer)
    limits = [max(1, min(max_new_tokens, window - len(context))) for context in contexts]
    may_pad = forward_accepts(model, "position_ids")
    generations: dict[int, Generation] = {}

    def kind(i: int) -> tuple[int, int]:
        return limits[i], 0 if may_pad else len(contexts[i])

    def score(group: list[int]) -> None:
        for (limit, _), rows in groupby(sorted(group, key=kind), key=kind):
            indices = list(rows)
            generated = _generate(model, [contexts[i] for i in indices], encoder, limit)
            ended = (_until_end(ids, end_ids, encoder) for ids in generated)
            generations.update(zip(indices, ended, strict=True))

    sizes = [(len(context) + max_new_tokens, vocabulary_of(model)) for context in contexts]
    score_in_groups(score, sizes, next(model.parameters()).device, progress=progress)
    return [generations[i] for i in range(len(contexts))]


def stream_greedily(
    model: nn.Module,
    context: list[int],
    encoder: PromptEncoder,
    *,
    max_new_tokens: int,
    tell: Callable[[str], None],
) -> None:
    """Generate the answer to one prompt and pass on its words as they come, without the end token.

    Raises:
        ModelError: Logits are not finite.
    """
    end_ids = _end_tokens(model, encoder)

    class Words(TextStreamer):
        def put(self, value: Tensor) -> None:
            if self.next_tokens_are_prompt or int(value.flatten()[-1]) not in end_ids:
                super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            tell(text)

    words = Words(encoder.tokenizer, skip_prompt=True)
    _generate(model, [context], encoder, max_new_tokens, streamer=words)


def _generate(
    model: nn.Module, contexts: list[list[int]], encoder: PromptEncoder, max_new_tokens: int, streamer: Any = None
) -> list[list[int]]:
    """The new tokens after each context, padded.

    Of the model's own generation settings only the end tokens are used, because a chat model's repetition penalty would
    change greedy decoding.
    """
    base, device = base_of(model), next(model.parameters()).device
    settings = GenerationConfig(
        do_sample=False, num_beams=1, eos_token_id=_end_tokens(model, encoder), pad_token_id=encoder.pad_id
    )
    tokens, mask = (t.to(device) for t in pad(contexts, encoder.pad_id, side="left"))
    with scoring_mode(model), with_attributes(base, generation_config=settings):
        output = base.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=streamer,
            logits_processor=[RequireFinite()],
        )  # fmt: skip
    new: list[list[int]] = output[:, tokens.shape[1] :].tolist()
    return new


class RequireFinite(LogitsProcessor):
    """Stop a generation whose logits are not finite."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not bool(torch.isfinite(scores.amax(-1)).all()):
            raise ModelError(f"The logits of a generated token {NOT_FINITE}")
        return scores


def _until_end(ids: list[int], end_ids: list[int], encoder: PromptEncoder) -> Generation:
    end = next((i for i, token in enumerate(ids) if token in end_ids), None)
    return Generation(encoder.tokenizer.decode(ids[:end]), truncated=end is None)


def _end_tokens(model: nn.Module, encoder: PromptEncoder) -> list[int]:
    return sorted({*encoder.end_ids, *stated_ids(base_of(model).generation_config.eos_token_id)})
