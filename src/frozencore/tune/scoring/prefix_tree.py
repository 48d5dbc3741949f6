"""Log-likelihoods of continuations, with every prefix that prompts and choices share computed once.

The sequences of a batch are merged into a tree of tokens, without padding. A token is one column of a single packed
sequence; a segment is a run of columns each of which follows the one before it, so that a prompt and its first choice
are one segment and every other choice is another. Everything but attention is per token and sees the packed sequence;
attention is computed per segment, over the segment and the columns on its path from the root, by the model's own
``sdpa`` function. Thus no choice meets another, as it would under a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from frozencore.tune.rows import ChoiceTokens
from frozencore.tune.scoring.forward import base_of

_NAME = "frozencore_prefix_tree"
_NO_PARENT = -1


@dataclass(frozen=True)
class Segment:
    """Columns ``start`` to ``stop``; ``path``: those they see, themselves last; ``None`` if that is all they see."""

    start: int
    stop: int
    path: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class PrefixTree:
    """One column per distinct prefix: its last token, its length less one, and the column of the prefix before it."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    columns: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, ids: Sequence[int]) -> list[int]:
        """The column of every prefix of a sequence; those that are new are appended."""
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
    own = config._attn_implementation
    token = _segments.set(segments)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = own
        _segments.reset(token)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Queries, keys, values (1, heads, columns, size) to (1, columns, heads, size)."""
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
