"""The capture on drawn shapes, paddings and dtypes, against sums that are made one token at a time in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import references as ref
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.counted_tokens import CountedTokens
from frozencore.calibration.taps import Taps, capturing
from frozencore.maths.moments import MOMENT_NAMES
from references import numpy_of
from tiny import Example, batches_of, tiny_qwen2, with_positions
from trials import tried

EVERYTHING = frozenset(MOMENT_NAMES)
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}


@dataclass(frozen=True)
class Call:
    """One call of a layer: inputs (batch, time, n), output errors and outputs (batch, time, m)."""

    x: Tensor
    delta: Tensor
    y: Tensor


def summed(calls: list[Call], mask: Tensor, *, sizes_only: bool = False) -> ref.ReferenceMoments:
    """Over the counted tokens of all calls; with ``sizes_only`` nothing cancels, which bounds the rounding."""
    sums: dict[str, ref.ReferenceMoments] = {}
    for call in calls:
        for place in mask.nonzero().tolist():
            rows = [numpy_of(values[tuple(place)]) for values in (call.x, call.delta, call.y)]
            ref.add_token(sums, "layer", *(np.abs(row) if sizes_only else row for row in rows))
    return sums["layer"]


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    """Which tokens of a batch count: at least one, and not always one block. The shape shows the order of the rows."""
    batch, time = draw(st.tuples(st.integers(1, 4), st.integers(1, 7)).filter(lambda shape: shape[0] != shape[1]))
    counted = draw(st.lists(st.booleans(), min_size=batch * time, max_size=batch * time).filter(any))
    return torch.tensor(counted).reshape(batch, time)


@given(
    mask=masks(),
    m=st.integers(1, 9),
    n=st.integers(1, 9),
    dtype=st.sampled_from(list(ROUNDING)),
    num_calls=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@tried(2)
def test_the_sums_of_any_layer_are_those_of_its_counted_tokens(
    mask: Tensor, m: int, n: int, dtype: torch.dtype, num_calls: int, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(n, m, bias=bias).to(dtype)
    calls = []
    with capturing(Taps({"layer": layer}, EVERYTHING)) as capture:
        capture.tokens = CountedTokens.from_mask(mask)
        for _ in range(num_calls):
            x, delta = (torch.randn(*mask.shape, k, generator=generator, dtype=dtype) for k in (n, m))
            y = layer(x)
            y.backward(delta)
            calls.append(Call(x, delta, y))
        found = capture.recorders["layer"].moments()
    assert found.num_tokens == num_calls * int(mask.sum())
    expected, size = summed(calls, mask), summed(calls, mask, sizes_only=True)
    for name in MOMENT_NAMES:
        error = np.abs(numpy_of(getattr(found, name)) - getattr(expected, name))
        assert (error <= ROUNDING[dtype] * getattr(size, name)).all(), name


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """A decoder of drawn widths, with query heads that share key and value heads or not."""
    kv_heads, shared, size = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from((2, 4, 6)))
    return tiny_qwen2(
        seed=draw(st.integers(0, 99)),
        hidden_size=kv_heads * shared * size,
        num_attention_heads=kv_heads * shared,
        num_key_value_heads=kv_heads,
        intermediate_size=draw(st.integers(1, 20)),
        num_hidden_layers=draw(st.integers(1, 2)),
    ).double()


@st.composite
def examples(draw: st.DrawFn) -> Example:
    ids = draw(st.lists(st.integers(1, 39), min_size=3, max_size=9))
    return Example(tuple(ids), draw(st.integers(1, len(ids) - 1)))


@given(
    model=models(),
    rows=st.lists(examples(), min_size=1, max_size=5),
    side=st.sampled_from(("left", "right")),
    batch_size=st.integers(1, 5),
    group_size=st.sampled_from((3, 99)),
)
@tried(0.5)
def test_the_moments_of_any_model_and_padding_are_those_of_its_rows_alone(
    model: nn.Module, rows: list[Example], side: str, batch_size: int, group_size: int
) -> None:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    found = collect_moments(
        model, with_positions(batches_of(rows, batch_size, side)), names, needs=EVERYTHING,
        options=CalibrationOptions(group_size=group_size),
    )  # fmt: skip
    expected = ref.reference_moments(model, [(list(row.ids), row.num_prompt) for row in rows], names)
    assert list(found) == names
    assert [found[name].num_tokens for name in names] == [sum(len(row.ids) for row in rows)] * len(names)
    for moment in MOMENT_NAMES:  # beside the largest of all layers: equal tokens leave one with nothing but rounding
        differences = [numpy_of(getattr(found[name], moment)) - getattr(expected[name], moment) for name in names]
        largest = max(np.abs(getattr(expected[name], moment)).max() for name in names)
        assert max(np.abs(difference).max() for difference in differences) <= 1e-10 * largest, moment
