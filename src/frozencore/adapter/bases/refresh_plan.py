"""Plan a refreshed training: the number of rounds, the share of summed steps, and the memory (docs/refreshing.md)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import is_linear, layer_shape
from frozencore.calibration.budget import layer_cost, memory_bytes
from frozencore.calibration.running_sketch import sketch_bytes
from frozencore.errors import ConfigError
from frozencore.maths.linalg import Shape
from frozencore.words import at_least

COST = 0.09  # extra products, as a share of the training's; with the refreshes at most 15 % of its time
ROWS_OF_A_ROUND = 100  # with fewer rows a new basis is worse
SUMMED_OF_A_ROUND = 40  # with fewer summed rows, more rounds gain nothing
STEPS_OF_A_ROUND = 6  # with fewer steps fresh optimizer state makes no progress
MOST_ROUNDS = 16  # limit of ``auto``, because each round makes the adapter larger
MEMORY = "128MB"  # for choosing new bases
NARROWEST, WIDEST, STEP = 2, 8, 1 / 8  # times the rank: columns of a sketch


def rounds_for(num_rows: int, num_steps: int, share: float) -> int:
    """The number of rounds that ``auto`` chooses.

    Args:
        num_rows: The rows of all epochs.
        num_steps: Optimizer steps.
        share: The share of the steps that are summed.
    """
    summed = int(num_rows * share)
    most = num_rows // ROWS_OF_A_ROUND, summed // SUMMED_OF_A_ROUND, num_steps // STEPS_OF_A_ROUND, MOST_ROUNDS
    return max(1, min(most))


def share_to_gather(
    model: nn.Module, shapes: Mapping[str, Shape], cost: float, widths: Mapping[str, int] | None = None
) -> float:
    """The share of the steps that are summed.

    A step takes two products for each weight of the model. An exact sum adds one product for each weight of the
    layers; a sketch of k columns adds 2k(m + n) for each layer.

    Args:
        widths: The columns k of each layer's sketch; None for exact sums.
    """
    if widths is None:
        seen = sum(m * n for m, n in shapes.values())
    else:
        seen = sum(2 * widths[name] * (m + n) for name, (m, n) in shapes.items())
    whole = (layer_shape(module) for module in model.modules() if is_linear(module))
    return min(1.0, cost * 2 * sum(m * n for m, n in whole) / seen)


def widths_within(
    memory_budget: int | str | None, shapes: Mapping[str, Shape], ranks: Mapping[str, int], config: FrozenCoreConfig
) -> dict[str, int] | None:
    """The columns of each layer's sketch; None for exact sums, if they fit or the constructor needs them.

    Args:
        memory_budget: The memory for choosing new bases; by default 128 MB, or the size of the narrowest sketches.
    """
    budget = memory_bytes(MEMORY if memory_budget is None else memory_budget)
    needs, metric = config.needs, config.metric
    costs = [layer_cost(shape, needs, ranks[name], num_rows=0) for name, shape in shapes.items()]
    exact = sum(cost.sums for cost in costs) + max(cost.building for cost in costs)
    if exact <= budget or (metric is None and memory_budget is None):
        return None
    smallest = exact
    if metric is not None:
        steps = range(round(WIDEST / STEP), round(NARROWEST / STEP) - 1, -1)
        for widths in ({name: int(STEP * step * rank) for name, rank in ranks.items()} for step in steps):
            held, turning = zip(*(sketch_bytes(shape, widths[name]) for name, shape in shapes.items()), strict=True)
            smallest = sum(held) + max(turning)
            if smallest <= budget:
                return widths
        if memory_budget is None:
            return widths
    raise ConfigError(
        f"A memory budget of {memory_budget} is too small for the sums that refreshing chooses bases by: the smallest "
        f'that works is "{at_least(smallest)}". Fewer target modules or a lower rank need less.'
    )


def held_in_rounds(
    shapes: Mapping[str, Shape], ranks: Mapping[str, int], sums: int, rounds: int, weights: torch.dtype
) -> int:
    """The peak bytes that rounds add to a training, beside gradients and optimizer states.

    The peak is at the end of the last round, or of the previous round, which still sums moments.

    Args:
        sums: Bytes of the sums or sketches of moments.
        weights: The dtype of the base model's weights, and of P and Q.
    """

    def past(earlier: int) -> int:
        if earlier < 1:
            return 0
        held = 0
        for name, (m, n) in shapes.items():
            r, k = ranks[name], (earlier + 1) * ranks[name]
            held += weights.itemsize * earlier * r * (m + n) + 4 * k * k
        return held

    return max(sums + past(rounds - 2), past(rounds - 1)) if rounds > 1 else 0


def sums_bytes(
    shapes: Mapping[str, Shape], ranks: Mapping[str, int], widths: Mapping[str, int] | None, config: FrozenCoreConfig
) -> int:
    """The most bytes of the sums of moments, or of sketches with these widths."""
    if widths is not None:
        return sum(sketch_bytes(shape, widths[name])[0] for name, shape in shapes.items())
    needs = config.needs
    return sum(layer_cost(shape, needs, ranks[name], num_rows=0).sums for name, shape in shapes.items())
