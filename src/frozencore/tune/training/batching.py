"""Make batches of training rows: grouped by length, or filled up for several processes.

A step is the same except for rounding: the same rows, and the mean loss over all their completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.utils.data import Sampler

from frozencore.calibration.batches import on_one_side
from frozencore.ranks import num_ranks
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator
from frozencore.tune.training.recipe import Recipe

WITHOUT_LOSS = TokenRow("", [0], 1)
RowCollator = Callable[[Sequence[TokenRow]], dict[str, Any]]


def filled_up(rows: Sequence[TokenRow], multiple: int) -> list[TokenRow]:
    """Add rows without loss in a process group, so that all processes get the same number of batches."""
    missing = -len(rows) % multiple if num_ranks() > 1 else 0
    return [*rows, *[WITHOUT_LOSS] * missing]


def without_fillers(collate: RowCollator) -> RowCollator:
    """Make a collator that drops rows without loss, except one if a process has no other rows."""
    return lambda rows: collate([row for row in rows if row is not WITHOUT_LOSS] or rows[:1])


class RowOrder(Sampler[int]):
    """The rows in the order of the recipe; rows without loss come last.

    accelerate distributes batches over processes in turn, so all processes together train on the rows of one step.
    """

    def __init__(self, rows: Sequence[TokenRow], recipe: Recipe) -> None:
        self._num_rows, self._recipe, self._epoch = len(rows), recipe, 0
        self._num_of_loss = sum(row is not WITHOUT_LOSS for row in rows)

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[int]:
        yield from self._recipe.row_order(self._num_of_loss, self._epoch)
        yield from range(self._num_of_loss, self._num_rows)

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self._epoch = epoch


GROUPS = "groups"
PASS_WORK = {"cpu": 1.5e8}  # fixed cost of a pass, in tokens times parameters
PASS_WORK_ELSEWHERE = 1e13  # an estimate for devices on which kernel launches dominate
WEIGHTS_READ = 75  # tokens that a pass costs however large the model is: it reads all weights, for one row or for many


def group_by_length(lengths: Sequence[int], most_tokens: int, pass_tokens: int) -> list[list[int]]:
    """Group row indices, longest rows first, so that padded tokens and passes cost least.

    The groups are consecutive in the sorted lengths, and dynamic programming finds the best split.

    Args:
        lengths: The lengths of the rows.
        most_tokens: The most tokens of a group, padding included; a longer row is a group of its own.
        pass_tokens: The fixed cost of a group, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    costs, begins = [0], [0]  # of the best split of the first rows, and the start of its last group
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
    """The fixed cost of a forward and backward pass on the model's device, in tokens.

    On a CPU core a pass of 16 to 1,024 tokens took 17 ms and 0.13 ms a token (the pocket model, 1.3 million
    parameters), 14 ms and 0.10 ms (``tiny1m``). With 135 million parameters in bfloat16 (SmolLM2) a pass of 64 to
    1,024 tokens took 110 ms and 1.4 ms a token: calls cost the same for any model, reading the weights does not.
    """
    work = PASS_WORK.get(next(model.parameters()).device.type, PASS_WORK_ELSEWHERE)
    return WEIGHTS_READ + round(work / sum(parameter.numel() for parameter in model.parameters()))


@dataclass(frozen=True)
class GroupingCollator:
    """Collate the rows of a step into batches under one key, each made by :class:`PaddingCollator`."""

    pad_id: int
    most_tokens: int
    pass_tokens: int
    limit: int | None = None  # of frozencore.calibration.batches.rope_limit

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, Any]:
        lengths = [len(row.input_ids) for row in rows]
        groups = on_one_side(group_by_length(lengths, self.most_tokens, self.pass_tokens), lengths, self.limit)
        return {GROUPS: [PaddingCollator(self.pad_id)([rows[i] for i in group]) for group in groups]}
