"""The rows of an optimiser step through the model in groups of similar length, so that little of them is padding.

The step is the same to rounding: the same rows, and the mean loss over the completion tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.calibration.counted import IGNORED
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.batches import PaddingCollator
from frozencore.tune.training.trainer import CompletionTrainer

GROUPS = "groups"
PASS_WORK = {"cpu": 1.5e8}  # what a pass costs beside its tokens, in tokens times parameters
PASS_WORK_ELSEWHERE = 1e13  # where launching kernels takes the time; an estimate


def group_by_length(lengths: Sequence[int], most_tokens: int, pass_tokens: int) -> list[list[int]]:
    """Indices of rows in groups, the longest rows first, of the least padded tokens and passes together.

    The best cut of the sorted lengths, found by going through them once (the groups of the best cut are consecutive).

    Args:
        lengths: Of each row, at least one.
        most_tokens: Of a group, padding included; a longer row is a group of its own.
        pass_tokens: What a group costs beside its tokens, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    costs, begins = [0], [0]  # of the best cut of the first rows, and where its last group begins
    for end in range(1, len(order) + 1):
        most_rows = max(1, most_tokens // max(1, lengths[order[end - 1]]))  # of the shortest row of the group
        starts = [
            start
            for start in range(max(0, end - most_rows), end)
            if end - start == 1 or (end - start) * lengths[order[start]] <= most_tokens
        ]
        found = [costs[start] + (end - start) * lengths[order[start]] + pass_tokens for start in starts]
        best = min(range(len(starts)), key=found.__getitem__)
        costs.append(found[best])
        begins.append(starts[best])
    cuts = [len(order)]
    while cuts[-1]:
        cuts.append(begins[cuts[-1]])
    return [order[start:end] for start, end in pairwise(reversed(cuts))]


def pass_tokens_of(model: Any) -> int:
    """What a forward and backward pass costs beside its tokens, in tokens, on the model's device.

    On a CPU core a pass of 16 to 1,024 tokens took 17 ms and 0.13 ms a token (the pocket model, 1.3 million
    parameters), 14 ms and 0.10 ms (``tiny1m``); with more parameters a token takes longer and a pass does not.
    """
    work = PASS_WORK.get(next(model.parameters()).device.type, PASS_WORK_ELSEWHERE)
    return round(work / sum(parameter.numel() for parameter in model.parameters()))


@dataclass(frozen=True)
class GroupingCollator:
    """The rows of a step as batches under one key, each as :class:`PaddingCollator` makes it."""

    pad_id: int
    most_tokens: int
    pass_tokens: int

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, Any]:
        groups = group_by_length([len(row.input_ids) for row in rows], self.most_tokens, self.pass_tokens)
        return {GROUPS: [PaddingCollator(self.pad_id)([rows[i] for i in group]) for group in groups]}


class GroupingTrainer(CompletionTrainer):
    """Takes the batches of a step one after the other, and their gradients together."""

    _own = 1

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        groups: list[dict[str, Tensor]] = inputs[GROUPS]
        counted = self._get_num_items_in_batch(groups, self.args.device)
        if counted is None:
            self._own = sum(map(_num_targets, groups))
        losses = [super(GroupingTrainer, self).training_step(model, group, counted) for group in groups]
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Of a model that takes the mean of each batch by itself, weighed by the batch's share of the tokens."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if num_items_in_batch is not None else loss * (_num_targets(inputs) / self._own)


def _num_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())
