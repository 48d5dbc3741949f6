"""The memory and the extra time of a refreshed training, at the shapes of real models."""

from __future__ import annotations

import pytest

from frozencore import FrozenCoreConfig
from frozencore.adapter.bases.refresh_plan import rounds_for, widths_within
from frozencore.calibration.running_sketch import sketch_bytes
from frozencore.errors import ConfigError

QWEN_3B = {
    f"layers.{i}.{name}": shape
    for i in range(36)
    for name, shape in {"q": (2048, 2048), "k": (256, 2048), "v": (256, 2048), "o": (2048, 2048)}.items()
}
RANKS = dict.fromkeys(QWEN_3B, 16)


def test_at_the_attention_of_qwen_3b_all_that_bases_are_chosen_by_takes_at_most_128_mb() -> None:
    """Exact sums take 1.4 GB. Y and Z 4k(m + n) bytes, tests 2k(m + n), a, d and two roots 4 each; and, for a moment
    at a refresh, the work of one layer."""
    assert sum(4 * (m * n + m + n) for m, n in QWEN_3B.values()) == 1_360_797_696
    widths = widths_within(None, QWEN_3B, RANKS, FrozenCoreConfig(r=16))
    assert widths is not None
    assert set(widths.values()) == {42}
    held = sum(sketch_bytes(shape, widths[name])[0] for name, shape in QWEN_3B.items())
    assert held == sum(6 * 42 * (m + n) + 8 * (m + n) for m, n in QWEN_3B.values()) == 119_808_000
    assert held + max(sketch_bytes(shape, 42)[1] for shape in QWEN_3B.values()) < 128e6


def test_a_budget_chooses_between_exact_sums_and_sketches_as_wide_as_fit() -> None:
    config = FrozenCoreConfig(r=16)
    assert widths_within("2GB", QWEN_3B, RANKS, config) is None
    widest, wide, narrow = (widths_within(size, QWEN_3B, RANKS, config) for size in ("1GB", "256MB", "100MB"))
    assert widest
    assert wide
    assert narrow
    assert set(widest.values()) == {128}
    assert 64 < wide["layers.0.q"] < 128
    assert set(narrow.values()) == {32}
    with pytest.raises(ConfigError, match='of 64MB is too small .* the smallest that works is "97MB"'):
        widths_within("64MB", QWEN_3B, RANKS, config)
    ragged = widths_within(None, QWEN_3B, {name: 8 + i % 9 for i, name in enumerate(QWEN_3B)}, config)
    assert ragged is not None
    assert len(set(ragged.values())) > 5


def test_without_a_budget_nothing_is_refused() -> None:
    """The narrowest sketches where 128 MB hold none; exact sums where the constructor can do with nothing else."""
    large = {f"{i}.{name}": shape for i in range(8) for name, shape in QWEN_3B.items()}
    widths = widths_within(None, large, dict.fromkeys(large, 16), FrozenCoreConfig(r=16))
    assert widths is not None
    assert set(widths.values()) == {32}
    dense = FrozenCoreConfig(r=16, constructor="filora")
    assert widths_within(None, QWEN_3B, RANKS, dense) is None
    with pytest.raises(ConfigError, match="of 128MB is too small"):
        widths_within("128MB", QWEN_3B, RANKS, dense)


@pytest.mark.parametrize(
    ("rows", "steps", "share", "rounds"),
    [
        (1600, 200, 1.0, 16), (1600, 200, 0.67, 16), (1600, 200, 0.22, 8), (800, 100, 1.0, 8), (99, 13, 1.0, 1),
        (1600, 25, 1.0, 4), (1600, 5, 1.0, 1), (100_000, 12_500, 0.1, 16),
    ],
)  # fmt: skip
def test_auto_makes_a_round_of_a_hundred_rows_forty_of_them_summed_six_steps_at_least_and_sixteen_at_most(
    rows: int, steps: int, share: float, rounds: int
) -> None:
    assert rounds_for(rows, steps, share) == rounds
