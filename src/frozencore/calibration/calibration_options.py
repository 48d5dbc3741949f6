"""The options of a calibration pass (docs/method.md says why the defaults), and its plan for a memory budget.

The budget is the memory that calibration takes beyond a plain forward and backward pass over the same batches: the
sums, the inputs kept for the backward pass, the temporaries of one layer, and the finished bases.
Costs are upper bounds in bytes. Letters: a layer of m outputs and n inputs, r the rank, N rows of the largest batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.linalg import GRAM_LIMIT, KRYLOV_BLOCKS, KRYLOV_WIDTH, Shape
from frozencore.maths.moments import MomentName
from frozencore.options import check_options
from frozencore.text import at_least, bytes_in_words, read_size

Tokens = Literal["nonpad", "completion", "nonzero_delta"]
Weighting = Literal["example_mean", "token_sum", "token"]


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


def _size(size: Any) -> Any:
    memory_bytes(size)
    return size


def _device(name: str) -> str:
    import torch

    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"stats_device must be a device such as cpu or cuda:1, but {name!r} came.") from error
    return name


def _full_name(weighting: Weighting) -> Weighting:
    return "token_sum" if weighting == "token" else weighting


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of one pass; the options that change the sums are part of a moments file's fingerprint."""

    tokens: Annotated[
        Tokens,
        Field(
            description="Tokens that are summed. nonpad: all except padding; completion: those that predict a "
            "completion token (in an encoder: all except padding); nonzero_delta: those with a nonzero output error."
        ),
    ] = "nonpad"
    skip_first: Annotated[
        int, Field(ge=0, description="Tokens at the start of each sequence that are not summed (attention sinks).")
    ] = 0
    weighting: Annotated[
        Weighting,
        AfterValidator(_full_name),
        Field(
            description="Weights in the loss. example_mean: every example has the same weight, whatever its number of "
            "completion tokens. token_sum (or token): every completion token has the same weight, as in training. "
            "docs/method.md compares both."
        ),
    ] = "example_mean"
    group_size: Annotated[
        int, Field(ge=1, description="Layers per pass (the paper's calib_group_size); 999 means all at once.")
    ] = 999
    memory_budget: Annotated[
        Annotated[int | str, BeforeValidator(_size)] | None,
        Field(
            description="Memory of calibration beyond a plain forward and backward pass, such as 8GB, or a number of "
            "bytes. Calibration then chooses groups of layers and the sums' device (docs/large-models.md). "
            "Default: none."
        ),
    ] = None
    stats_device: Annotated[
        Annotated[str, AfterValidator(_device)] | None,
        Field(description="Device of the sums, such as cpu. Default: each layer's own device."),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "weighting", _full_name(self.weighting))


def options_of_sums(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that change the sums of a pass; the others say where sums are held, and how many at a time."""
    return {name: options[name] for name in options if name not in ("group_size", "memory_budget", "stats_device")}


@dataclass(frozen=True)
class LayerCost:
    """The memory of one layer in bytes.

    Attributes:
        sums: Held from the pass until the layer's basis is built.
        waiting: Held from the layer's forward to its backward, beside the other layers' inputs.
        passing: Held briefly while products are summed.
        building: Held while the basis is built.
        basis: P and Q, held to the end.
    """

    sums: int
    waiting: int
    passing: int
    building: int
    basis: int


def plan_passes(
    costs: Mapping[str, LayerCost], budget: int, *, group_size: int = 999
) -> tuple[list[tuple[str, ...]], int]:
    """Find the fewest groups of layers, each with its own pass over the data, that stay within a budget.

    Args:
        costs: By layer name, in the order in which layers run, because neighbours share inputs.
        group_size: The most layers in a group.

    Returns:
        The groups, and an upper bound of calibration's memory in bytes.

    Raises:
        ConfigError: Some layer does not fit; the message names the smallest budget that works.
    """
    groups: list[list[str]] = []
    for name in costs:
        if groups and len(groups[-1]) < group_size and _peak(costs, [*groups[-1], name]) <= budget:
            groups[-1].append(name)
        elif _peak(costs, [name]) <= budget:
            groups.append([name])
        else:
            raise ConfigError(
                f"A memory budget of {bytes_in_words(budget)} is too small for these layers, even one at a time: the "
                f'smallest that works is "{at_least(smallest_budget(costs))}". Smaller batches or fewer target modules '
                "need less."
            )
    return [tuple(group) for group in groups], max(_peak(costs, group) for group in groups)


def smallest_budget(costs: Mapping[str, LayerCost]) -> int:
    """The bytes needed to calibrate the layers one at a time."""
    return max(_peak(costs, [name]) for name in costs)


def layer_cost(
    shape: Shape,
    needs: frozenset[MomentName],
    rank: int,
    *,
    num_rows: int,
    itemsize: int = 4,
    in_place: bool = False,
) -> LayerCost:
    """Compute upper bounds of one layer's memory.

    Args:
        needs: The moments that the basis is built from.
        num_rows: Tokens of the largest batch, padding included.
        itemsize: Bytes of a number in the model; a number in a sum takes at least four.
        in_place: The cross moment is whitened in its own memory.
    """
    m, n = shape
    r, e = min(rank, m, n), max(4, itemsize)
    sides: dict[MomentName, int] = {"cross": m * n, "input_outer": n * n, "error_outer": m * m, "output_outer": m * m}
    matrices = {name: size for name, size in sides.items() if name in needs}
    vectors = 2 * (m + n)
    return LayerCost(
        sums=e * (sum(matrices.values()) + vectors),
        waiting=num_rows * n * itemsize,
        passing=2 * e * num_rows * (m + n) + e * matrices.get("input_outer", 0),
        building=_building(shape, matrices, r, e) + (0 if in_place else e * m * n) + 64 * r * (m + n),
        basis=4 * r * (m + n),
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


def _peak(costs: Mapping[str, LayerCost], group: list[str]) -> int:
    """Peak bytes of a group: at the end of its backward pass, or while its largest basis is built."""
    own = [costs[name] for name in group]
    passing = sum(cost.waiting for cost in own) + max(cost.passing for cost in own)
    building = max(cost.building for cost in own)
    bases = sum(cost.basis for cost in costs.values())
    return bases + sum(cost.sums for cost in own) + max(passing, building)


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
