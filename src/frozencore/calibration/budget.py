"""Plan calibration passes for a memory budget: which layers are summed together, and exactly or as sketches.

The budget is the memory that calibration takes beyond a plain forward and backward pass over the same batches. It
covers the sums, the inputs kept for the backward pass, the temporaries of one layer, and the finished bases.
Costs are upper bounds in bytes. Letters: a layer of m outputs and n inputs, r the rank, N rows of the largest batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.linalg import GRAM_LIMIT, KRYLOV_BLOCKS, KRYLOV_WIDTH, Shape
from frozencore.maths.moments import MomentName
from frozencore.words import at_least, bytes_in_words, read_size

SKETCH_WIDTH, KEPT_WIDTH = 8, 2  # times the rank: columns of a sketch, and columns kept from its first round
SKETCH_PASSES = 4


def memory_bytes(size: object) -> int:
    """Read a size in bytes: a number, or text such as ``"8GB"`` or ``"512 MB"`` (1 GB = 1000³, 1 GiB = 1024³).

    Raises:
        ConfigError: ``size`` is neither, or not positive.
    """
    found = read_size(size)
    if found is None:
        raise ConfigError(
            f'A memory budget is a positive size such as "8GB", "512 MB" or a number of bytes, but {size!r} came.'
        )
    return found[0]


@dataclass(frozen=True)
class LayerCost:
    """The memory of one layer in bytes.

    Attributes:
        sums: Held from the pass until the layer's basis is built.
        waiting: Held from the layer's forward to its backward, beside the other layers' inputs.
        passing: Held briefly while products are summed.
        building: Held while the basis is built.
        basis: P and Q, held to the end.
        sketch, sketch_building: The same as ``sums`` and ``building`` for a sketch; None if the basis needs exact sums.
    """

    sums: int
    waiting: int
    passing: int
    building: int
    basis: int
    sketch: int | None = None
    sketch_building: int = 0

    def sketched(self) -> LayerCost:
        """The costs with a sketch instead of exact sums."""
        assert self.sketch is not None
        return replace(self, sums=self.sketch, building=self.sketch_building)


@dataclass(frozen=True)
class PassPlan:
    """Groups of layers that are calibrated one after the other, each with its own passes over the data.

    Attributes:
        streaming: Sums are sketches, and each group takes four passes instead of one.
        peak_bytes: An upper bound of calibration's memory; 0 if no budget was given.
    """

    groups: tuple[tuple[str, ...], ...]
    streaming: bool = False
    peak_bytes: int = 0

    @property
    def num_passes(self) -> int:
        return len(self.groups) * (SKETCH_PASSES if self.streaming else 1)

    def num_runs(self, num_backward: int) -> int:
        """Count the runs of the model over the data, forward or backward.

        Args:
            num_backward: Backward passes for all moments of a batch. Only a sketch's first pass takes as many; its
                other passes take one.
        """
        return 2 * self.num_passes + len(self.groups) * (num_backward - 1)


def plan_passes(
    costs: Mapping[str, LayerCost], budget: int, *, group_size: int = 999, num_backward: int = 1
) -> PassPlan:
    """Find the plan with the fewest runs over the data within a budget; exact sums unless sketches need fewer.

    Args:
        costs: By layer name, in the order in which layers run, because neighbours share inputs.
        group_size: The most layers in a group.
        num_backward: Backward passes for all moments of a batch.

    Raises:
        ConfigError: Some layer does not fit; the message names the smallest budget that works.
    """
    plans = [_packed(costs, budget, group_size)]
    if all(cost.sketch is not None for cost in costs.values()):
        sketches = {name: cost.sketched() for name, cost in costs.items()}
        plan = _packed(sketches, budget, group_size)
        plans.append(plan and replace(plan, streaming=True))
    possible = [plan for plan in plans if plan is not None]
    if not possible:
        smallest = smallest_budget(costs)
        raise ConfigError(
            f"A memory budget of {bytes_in_words(budget)} is too small for these layers, even one at a time: the "
            f'smallest that works is "{at_least(smallest)}". Smaller batches or fewer target modules need less.'
        )
    return min(possible, key=lambda plan: plan.num_runs(num_backward))  # a tie goes to exact sums


def smallest_budget(costs: Mapping[str, LayerCost]) -> int:
    """The bytes needed to calibrate the layers one at a time."""
    exact = _peak(costs, [max(costs, key=lambda name: _alone(costs[name]))])
    if any(cost.sketch is None for cost in costs.values()):
        return exact
    sketches = {name: cost.sketched() for name, cost in costs.items()}
    return min(exact, _peak(sketches, [max(sketches, key=lambda name: _alone(sketches[name]))]))


def layer_cost(
    shape: Shape,
    needs: frozenset[MomentName],
    rank: int,
    *,
    num_rows: int,
    itemsize: int = 4,
    streams: bool = False,
    keeps_graph: bool = False,
) -> LayerCost:
    """Compute upper bounds of one layer's memory.

    Args:
        needs: The moments that the basis is built from.
        num_rows: Tokens of the largest batch, padding included.
        itemsize: Bytes of a number in the model; a number in a sum takes at least four.
        streams: The basis can be built from a sketch of the cross moment.
        keeps_graph: A second backward pass follows, so the first one frees nothing. The gradients of the
            block's residual and of layers beside this one then need memory that a plain pass would have freed.
    """
    m, n = shape
    r, e = min(rank, m, n), max(4, itemsize)
    sides: dict[MomentName, int] = {"cross": m * n, "input_outer": n * n, "error_outer": m * m, "output_outer": m * m}
    matrices = {name: size for name, size in sides.items() if name in needs}
    vectors = 2 * (m + n)
    k = min(SKETCH_WIDTH * r, m, n)
    kept = min(KEPT_WIDTH * r, k)
    return LayerCost(
        sums=e * (sum(matrices.values()) + vectors),
        waiting=num_rows * n * itemsize,
        passing=2 * (e + itemsize * keeps_graph) * num_rows * (m + n) + e * matrices.get("input_outer", 0),
        building=_building(shape, matrices, r, e) + (0 if streams else e * m * n) + 64 * r * (m + n),
        basis=4 * r * (m + n),
        sketch=e * ((k + kept) * (m + n) + vectors) if streams else None,
        sketch_building=4 * e * (k + kept) * max(m, n) + 64 * r * (m + n),
    )


def _building(shape: Shape, matrices: Mapping[MomentName, int], rank: int, e: int) -> int:
    """Bytes for the mean of each matrix and for its factorisation."""
    m, n = shape
    work = 0
    if "cross" in matrices:
        krylov = KRYLOV_WIDTH * KRYLOV_BLOCKS * rank
        gram = min(m, n) <= max(GRAM_LIMIT, krylov)
        work = e * m * n + (8 * m * n + 40 * min(m, n) ** 2 if gram else 4 * e * krylov * (m + n))
    squares = [size for name, size in matrices.items() if name != "cross"]
    if squares:
        work += 40 * max(squares) + 8 * sum(squares) + 24 * m * n  # float64: eigenvectors, roots, W or G
    return work


def _packed(costs: Mapping[str, LayerCost], budget: int, group_size: int) -> PassPlan | None:
    groups: list[list[str]] = []
    for name in costs:
        if groups and len(groups[-1]) < group_size and _peak(costs, [*groups[-1], name]) <= budget:
            groups[-1].append(name)
        elif _peak(costs, [name]) <= budget:
            groups.append([name])
        else:
            return None
    return PassPlan(tuple(map(tuple, groups)), peak_bytes=max(_peak(costs, group) for group in groups))


def _peak(costs: Mapping[str, LayerCost], group: list[str]) -> int:
    """Peak bytes of a group: at the end of its backward pass, or while its largest basis is built."""
    own = [costs[name] for name in group]
    passing = sum(cost.waiting for cost in own) + max(cost.passing for cost in own)
    building = max(cost.building for cost in own)
    bases = sum(cost.basis for cost in costs.values())
    return bases + sum(cost.sums for cost in own) + max(passing, building)


def _alone(cost: LayerCost) -> int:
    return cost.sums + max(cost.waiting + cost.passing, cost.building)


def halved(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Split the groups into groups of at most half the size of the first."""
    size = len(groups[0])
    if size == 1:
        raise CalibrationError(
            f"There is no memory to calibrate layer {groups[0][0]!r} even alone. Calibrate on smaller batches or "
            'shorter text, or with options=CalibrationOptions(stats_device="cpu").'
        )
    half = -(-size // 2)
    warnings.warn(
        f"Out of memory with {size} layers in a pass: calibration goes on with {half} at a time, which takes more "
        "passes and gives the same bases. Pass memory_budget to have them planned.",
        stacklevel=4,
    )
    return [group[i : i + half] for group in groups for i in range(0, len(group), half)]
