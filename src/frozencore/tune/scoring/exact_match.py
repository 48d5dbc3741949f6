"""Greedy generation, and whether the number in it is the right one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn
from transformers import GenerationConfig

from frozencore.errors import DataError
from frozencore.tune.rows.batches import pad
from frozencore.tune.rows.prompts import PromptEncoder, context_limit
from frozencore.tune.scoring.logits import RequireFinite
from frozencore.tune.scoring.memory import score_in_groups
from frozencore.tune.scoring.mode import base_of, scoring_mode, vocabulary_of
from frozencore.tune.scoring.score import Prediction
from frozencore.tune.scoring.virtual_tokens import generating, num_virtual_tokens
from frozencore.tune.tasks.answers import format_number, parse_answer
from frozencore.tune.tasks.task import Example
from frozencore.words import Progress


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
    tokens_per_batch: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[Prediction], int]:
    """What each example is answered with, in the examples' order, and how many answers met the length limit.

    Raises:
        DataError: An example's completion holds no answer, or from encoding.
    """
    golds = []
    for example in examples:
        gold = parse_answer(example.completion)
        if gold is None:
            raise DataError(f"Row {example.id}: the completion {example.completion!r} holds no marker with a number.")
        golds.append(gold)
    contexts = encoder.context_rows([encoder.render(example) for example in examples])
    generations = generate_greedily(
        model,
        contexts,
        encoder=encoder,
        max_new_tokens=max_new_tokens,
        tokens_per_batch=tokens_per_batch,
        progress=progress,
    )
    predictions = []
    for example, gold, generation in zip(examples, golds, generations, strict=True):
        number = parse_answer(generation.text)
        spelled = None if number is None else format_number(number)
        predictions.append(Prediction(example.id, spelled, format_number(gold), number == gold, text=generation.text))
    return predictions, sum(generation.truncated for generation in generations)


def generate_greedily(
    model: nn.Module,
    contexts: Sequence[list[int]],
    *,
    encoder: PromptEncoder,
    max_new_tokens: int,
    tokens_per_batch: int | None = None,
    progress: Progress | None = None,
) -> list[Generation]:
    """The likeliest next token, again and again, after each context; batches of similar length, padded left.

    Nothing of the model's own generation settings is used but its end tokens: a repetition penalty that a chat
    model carries would make decoding other than greedy. Where the model's context ends, so does the generation: a row
    that reaches it is generated beside rows of its own length only, so that no row's room depends on another. So is
    every row after virtual tokens, since PEFT counts padding between them and the row as positions.

    Raises:
        ModelError: Logits are not finite.
    """
    device = next(model.parameters()).device
    end_ids = _end_tokens(base_of(model), encoder.eos_id)
    num_virtual = num_virtual_tokens(model)
    window = context_limit(base_of(model), encoder.tokenizer) - num_virtual
    rooms = [max(1, min(max_new_tokens, window - len(context))) for context in contexts]
    kinds = [(room, len(context) if num_virtual else 0) for room, context in zip(rooms, contexts, strict=True)]
    generations: list[Generation | None] = [None] * len(contexts)
    sizes = [(len(context) + max_new_tokens, vocabulary_of(model)) for context in contexts]
    with scoring_mode(model), _greedy_settings(base_of(model), end_ids, encoder.pad_id):

        def score(group: list[int]) -> None:
            for (room, _), rows in groupby(sorted(group, key=kinds.__getitem__), key=kinds.__getitem__):
                own = list(rows)
                tokens, mask = (t.to(device) for t in pad([contexts[i] for i in own], encoder.pad_id, side="left"))
                output = generating(model).generate(
                    input_ids=tokens, attention_mask=mask, max_new_tokens=room, logits_processor=[RequireFinite()]
                )
                for i, ids in zip(own, output[:, tokens.shape[1] :].tolist(), strict=True):
                    generations[i] = _until_end(ids, end_ids, encoder.tokenizer)

        score_in_groups(score, sizes, device, tokens_per_batch=tokens_per_batch, progress=progress)
    return [generation for generation in generations if generation is not None]


def _until_end(ids: list[int], end_ids: list[int], tokenizer: Any) -> Generation:
    end = next((i for i, token in enumerate(ids) if token in end_ids), None)
    return Generation(tokenizer.decode(ids[:end], skip_special_tokens=True), truncated=end is None)


def _end_tokens(base: Any, eos_id: int) -> list[int]:
    stated = base.generation_config.eos_token_id
    stated = [] if stated is None else [stated] if isinstance(stated, int) else list(stated)
    return sorted({eos_id, *stated})


@contextmanager
def _greedy_settings(base: Any, end_ids: list[int], pad_id: int) -> Iterator[None]:
    """The model with generation settings of ours alone; its own are back afterwards."""
    own = base.generation_config
    base.generation_config = GenerationConfig(do_sample=False, num_beams=1, eos_token_id=end_ids, pad_token_id=pad_id)
    try:
        yield
    finally:
        base.generation_config = own
