"""Choice by log-likelihood: the choice whose tokens have the highest summed log-probability after the prompt.

Log-likelihoods of several continuations of one prompt, with the prompt computed once if the model allows it.

On the CPU, attention along a tree of prefixes needs no padding and the fewest operations. The sequences of a batch are
merged into a tree of tokens. Each token is one column of a single packed sequence, and a segment is a run of successive
tokens. A prompt and its first choice are one segment; every other choice is another. All operations except attention
are per token and work on the packed sequence. Attention is computed per segment, over the segment and the columns on
its path from the root, by the model's own ``sdpa`` function, so that no choice sees another.

On other devices one masked kernel for the whole batch is faster than many small ones. A prompt and all its choices are
one sequence. By a mask each choice sees the prompt and itself, and its positions continue from the prompt's. Prompts
are padded left and choices right, so that the columns of the needed logits are the same in every row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from frozencore.calibration.batches import on_one_side, rope_limit
from frozencore.errors import DataError, ModelError
from frozencore.quiet import with_attributes
from frozencore.tune.rows import ChoiceTokens, Example, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import PaddingCollator, pad, score_in_groups
from frozencore.tune.scoring import Prediction
from frozencore.tune.scoring.forward import (
    NOT_FINITE,
    base_of,
    completion_logprobs,
    forward_accepts,
    scoring_mode,
    token_logprobs,
    vocabulary_of,
)
from frozencore.words import Progress

_NAME = "frozencore_prefix_tree"
_NO_PARENT = -1


@dataclass(frozen=True)
class Segment:
    """Columns ``start`` to ``stop``. ``path`` holds the visible columns, their own last; ``None``: only their own."""

    start: int
    stop: int
    path: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class PrefixTree:
    """One column for each distinct prefix: its last token, its length minus one, and its parent's column."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    columns: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, ids: Sequence[int]) -> list[int]:
        """The column of every prefix of a sequence; new prefixes are appended."""
        path = []
        column = _NO_PARENT
        for position, token in enumerate(ids):
            parent, column = column, self.columns.setdefault((column, token), len(self.tokens))
            if column == len(self.tokens):
                self.tokens.append(token)
                self.positions.append(position)
                self.parents.append(parent)
            path.append(column)
        return path

    def segments(self) -> list[Segment]:
        starts = [column for column, parent in enumerate(self.parents) if parent != column - 1 or column == 0]
        return [self._segment(*ends) for ends in zip(starts, [*starts[1:], len(self.tokens)], strict=True)]

    def _segment(self, start: int, stop: int) -> Segment:
        before: list[int] = []
        column = self.parents[start]
        while column != _NO_PARENT:
            before.append(column)
            column = self.parents[column]
        if not before:
            return Segment(start, stop, None, None)
        path = torch.tensor([*reversed(before), *range(start, stop)])
        return Segment(start, stop, path, torch.ones(stop - start, len(path), dtype=torch.bool).tril(len(before)))


def prefix_tree_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens]) -> list[list[float]]:
    """Summed token log-probabilities, in nats, of every choice of every row, for a model on the CPU."""
    tree = PrefixTree()
    read, targets = [], []
    for row in rows:
        for choice in row.choice_ids:
            path = tree.add(row.context_ids + choice[:-1])  # a choice's last token is scored but never read
            read += path[len(row.context_ids) - 1 :]
            targets += choice
    wanted, of_wanted = torch.tensor(read).unique(return_inverse=True)
    with _attention_along(tree.segments(), model):
        logits = model(
            input_ids=torch.tensor([tree.tokens]),
            position_ids=torch.tensor([tree.positions]),
            use_cache=False,
            logits_to_keep=wanted,
        ).logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scored = logits[of_wanted, torch.tensor(targets)] - logits.logsumexp(-1)[of_wanted]
    of_choices = iter(scored.double().split([len(choice) for row in rows for choice in row.choice_ids]))
    return [[float(next(of_choices).sum()) for _ in row.choice_ids] for row in rows]


_segments: ContextVar[list[Segment]] = ContextVar("segments")


@contextmanager
def _attention_along(segments: list[Segment], model: nn.Module) -> Iterator[None]:
    config = base_of(model).config.get_text_config()
    token = _segments.set(segments)
    try:
        with with_attributes(config, _attn_implementation=_NAME):
            yield
    finally:
        _segments.reset(token)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention from queries, keys, values (1, heads, columns, size) to (1, columns, heads, size)."""
    attend = AttentionInterface()["sdpa"]
    parts = []
    for segment in _segments.get():
        own = slice(segment.start, segment.stop)
        if segment.path is None or segment.mask is None:
            k, v, mask = key[:, :, own], value[:, :, own], None
        else:
            k, v = key.index_select(2, segment.path), value.index_select(2, segment.path)
            mask = segment.mask[None, None]
        parts.append(attend(module, query[:, :, own], k, v, mask, **options)[0])
    return torch.cat(parts, dim=1), None


AttentionInterface.register(_NAME, _attend)


_PROMPT, _PADDING = 0, -1  # parts of a row; the choices are 1, 2, ...


def can_share_prefix(model: nn.Module) -> bool:
    """Return whether the model's attention accepts any mask and positions, and nothing else mixes tokens.

    Models with sliding windows, recurrent states, flash kernels or without explicit positions use full sequences.
    """
    base = base_of(model)
    if getattr(base, "_is_stateful", False) or not forward_accepts(
        model, "attention_mask", "position_ids", "logits_to_keep"
    ):
        return False
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
        return False
    if base.config._attn_implementation not in ("sdpa", "eager"):
        return False
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)
    return plain and _keeps_choices_apart(model)


def shared_prefix_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int) -> list[list[float]]:
    """Summed token log-probabilities, in nats, of every choice of every row."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and base_of(model).config.get_text_config()._attn_implementation == "sdpa":
        return prefix_tree_logprobs(model, rows)
    return prefix_mask_logprobs(model, rows, pad_id=pad_id)


def _keeps_choices_apart(model: nn.Module) -> bool:
    """Return whether a choice's score does not depend on the previous choice, as it would with an ignored mask."""
    last = vocabulary_of(model) - 1
    probes = [ChoiceTokens("probe", [0, last], [first, [last, 0, last]]) for first in ([0], [last, last, last])]
    try:
        with scoring_mode(model):
            scores = [shared_prefix_logprobs(model, [probe], pad_id=0)[0][1] for probe in probes]
    except Exception:  # a model's own attention may require another mask, and raises any error
        return False
    return abs(scores[0] - scores[1]) <= 1e-3 or not all(map(torch.isfinite, torch.tensor(scores)))


def prefix_mask_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int) -> list[list[float]]:
    """Compute :func:`shared_prefix_logprobs` with one masked sequence a row."""
    device = next(model.parameters()).device
    prompts, prompt_mask = pad([row.context_ids for row in rows], pad_id, side="left")
    # a choice's last token is scored but never read
    parts = [[k for k, choice in enumerate(row.choice_ids, start=1) for _ in choice[:-1]] for row in rows]
    inputs = [[token for choice in row.choice_ids for token in choice[:-1]] for row in rows]
    answers, _ = pad(inputs, pad_id, side="right")
    answer_parts, _ = pad(parts, _PADDING, side="right")
    part = torch.cat([torch.where(prompt_mask == 1, _PROMPT, _PADDING), answer_parts], dim=1)
    logits = model(
        input_ids=torch.cat([prompts, answers], dim=1).to(device),
        attention_mask=_mask(part.to(device), base_of(model).dtype),
        position_ids=_positions(part).to(device),
        use_cache=False,
        logits_to_keep=torch.arange(prompts.shape[1] - 1, part.shape[1], device=device),
    ).logits
    owner, column, target, choice_of = _scored(rows)
    scored = token_logprobs(logits[owner.to(device), column.to(device)], target.to(device)).cpu().double()
    flat = iter(scored.new_zeros(sum(len(row.choice_ids) for row in rows)).index_add_(0, choice_of, scored).tolist())
    return [[next(flat) for _ in row.choice_ids] for row in rows]


def _mask(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask (rows, 1, length, length): a token sees the prompt and its own part, up to itself."""
    query, key = part.unsqueeze(2), part.unsqueeze(1)
    length = part.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=part.device).tril()
    seen = causal & ((query == key) | ((key == _PROMPT) & (query != _PADDING)))
    return torch.zeros(seen.shape, dtype=dtype, device=part.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def _positions(part: Tensor) -> Tensor:
    """The position of each token in its prompt and choice; 0 for padding."""
    within = torch.zeros_like(part)
    for k in range(_PROMPT, int(part.max()) + 1):
        own = part == k
        within += (own.cumsum(1) - 1) * own
    return within + (part > _PROMPT) * (part == _PROMPT).sum(1, keepdim=True)


def _scored(rows: Sequence[ChoiceTokens]) -> Sequence[Tensor]:
    """For every scored token: its row, the column of its logits, the token, and the index of its choice."""
    scored: list[tuple[int, int, int, int]] = []
    num_choices = 0
    for owner, row in enumerate(rows):
        start = 1  # column 0 is the prompt's last token
        for choice in row.choice_ids:
            columns = [0, *range(start, start + len(choice) - 1)]
            scored += [(owner, column, token, num_choices) for column, token in zip(columns, choice, strict=True)]
            start += len(choice) - 1
            num_choices += 1
    return torch.tensor(scored).unbind(1)


def predict_choices(
    model: nn.Module,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    *,
    length_normalised: bool = False,
    progress: Progress | None = None,
) -> list[Prediction]:
    """Predict the likeliest choice of every example, in order; the first of equally likely ones.

    Args:
        length_normalised: Compare log-likelihood per character of the choice (the harness's ``acc_norm``).

    Raises:
        DataError: An example's completion is not among its choices, or its text cannot be encoded.
        ModelError: As in :func:`choice_logprobs`.
    """
    for example in examples:
        if example.completion not in example.choices:
            raise DataError(
                f"Row {example.id}: the answer {example.completion!r} is not among its choices {example.choices}."
            )
    rows = encoder.choice_rows([encoder.render(example) for example in examples])
    logprobs = choice_logprobs(model, rows, pad_id=encoder.pad_id, progress=progress)
    predictions = []
    for example, values in zip(examples, logprobs, strict=True):
        if length_normalised:
            values = [v / len(choice.strip()) for v, choice in zip(values, example.choices, strict=True)]
        choice = example.choices[max(range(len(values)), key=values.__getitem__)]
        predictions.append(
            Prediction(example.id, choice, example.completion, choice == example.completion, tuple(values))
        )
    return predictions


def choice_logprobs(
    model: nn.Module,
    rows: Sequence[ChoiceTokens],
    *,
    pad_id: int,
    tokens_per_batch: int | None = None,
    share_prefix: bool | None = None,
    progress: Progress | None = None,
) -> list[list[float]]:
    """Summed log-probabilities, in nats, of the tokens of every choice, in the rows' order.

    Args:
        tokens_per_batch: Padded tokens in one forward pass, which bound the memory; halved if memory runs out.
            ``None`` depends on the device.
        share_prefix: Compute each prompt once for all its choices. ``None``: if the model allows it.

    Raises:
        ModelError: A log-likelihood is not finite, or one row does not fit in memory.
    """
    share_prefix = can_share_prefix(model) if share_prefix is None else share_prefix
    limit = rope_limit(model)
    if limit is not None and any(len(row.context_ids) + max(map(len, row.choice_ids)) > limit for row in rows):
        share_prefix = False  # one row's choices may lie on both sides
    vocabulary = vocabulary_of(model)
    sizes = [_tokens_and_logits(row, vocabulary, share_prefix) for row in rows]
    device = next(model.parameters()).device
    logprobs: list[list[float]] = [[] for _ in rows]
    of_rows = shared_prefix_logprobs if share_prefix else full_sequence_logprobs

    def score(group: list[int]) -> None:
        scored = of_rows(model, [rows[i] for i in group], pad_id=pad_id)
        for i, values in zip(group, scored, strict=True):
            if not all(map(math.isfinite, values)):
                raise ModelError(f"Row {rows[i].id}: the model's log-likelihoods are {values[:3]}, which {NOT_FINITE}")
            logprobs[i] = values

    with scoring_mode(model):
        score_in_groups(score, sizes, device, tokens_per_batch=tokens_per_batch, progress=progress)
    return logprobs


def full_sequence_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int) -> list[list[float]]:
    """Compute the same with one full sequence per choice, padded right: slower, but right for every causal model."""
    device = next(model.parameters()).device
    full = [TokenRow(row.id, row.context_ids + ids, len(row.context_ids)) for row in rows for ids in row.choice_ids]
    sums = torch.zeros(len(full), dtype=torch.float64)  # in float32, hundreds of nats have an error in the fifth digit
    for side in on_one_side([range(len(full))], [len(row.input_ids) for row in full], rope_limit(model)):
        padded = PaddingCollator(pad_id)([full[i] for i in side])
        batch = {name: tensor.to(device) for name, tensor in padded.items()}
        sums[side] = completion_logprobs(model, batch)[0].cpu().double().sum(-1)
    totals = iter(sums.tolist())
    return [[next(totals) for _ in row.choice_ids] for row in rows]


def _tokens_and_logits(row: ChoiceTokens, vocabulary: int, share_prefix: bool) -> tuple[int, int]:
    """Tokens and logits that a row adds to a forward pass."""
    if share_prefix:
        num_scored = sum(map(len, row.choice_ids))
        return len(row.context_ids) + num_scored, num_scored * vocabulary
    num_choices, longest = len(row.choice_ids), max(map(len, row.choice_ids))
    return num_choices * (len(row.context_ids) + longest), num_choices * longest * vocabulary
