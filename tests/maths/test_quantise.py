"""Values of few bits, against a search over all codes and a slow float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frozencore.maths.quantise import BITS, levels, pack, quantise, unpack


def reference_error(x: np.ndarray, scale: float, bits: int) -> float:
    """The squared error of the nearest level of each value, over all levels."""
    grid = scale * (np.arange(2**bits) + 0.5 - 2 ** (bits - 1))
    return float(np.square(np.abs(x[:, None] - grid).min(1)).sum())


def drawn(kind: str, n: int = 256) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(3))
    return {"normal": x, "heavy": x**3, "one": torch.full((n,), 0.3), "tiny": x * 1e-5, "large": x * 1e4}[kind]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["normal", "heavy", "one", "tiny", "large"])
def test_no_scale_of_a_fine_grid_has_a_lower_error(kind: str, bits: int) -> None:
    x = drawn(kind)
    codes, scale = quantise(x, bits)
    error = (x.double() - levels(codes, scale, bits).double()).square().sum().item()
    values = x.double().numpy()
    scales = np.geomspace(1e-3, 2, 4000) * np.abs(values).max()
    best = min(reference_error(values, float(np.float16(s)), bits) for s in scales if np.float16(s) > 0)
    assert error == pytest.approx(reference_error(values, float(scale), bits), rel=1e-5)  # the codes are the nearest
    rounding = 1e-7 * float(np.square(values).sum())  # of a float16 scale
    assert error <= best * {2: 1.0005, 4: 1.02, 8: 1.25}[bits] + rounding


@pytest.mark.parametrize("bits", BITS)
def test_the_error_of_a_normal_vector_is_that_of_an_optimal_uniform_quantiser(bits: int) -> None:
    """Max (1960), table II: the mean squared error of uniform levels on a unit normal."""
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    codes, scale = quantise(x, bits)
    error = (x - levels(codes, scale, bits)).square().mean().item()
    assert error == pytest.approx({2: 0.1188, 4: 0.01154, 8: 1.0e-4}[bits], rel={2: 0.02, 4: 0.03, 8: 0.6}[bits])


@pytest.mark.parametrize("bits", BITS)
def test_zeros_stay_zero_and_so_do_values_that_are_nearer_to_it_than_to_the_smallest_levels(bits: int) -> None:
    for x in (torch.zeros(9), torch.tensor([0.0, 1e-30, 0.0]), torch.full((9,), 1e-9)):
        assert torch.equal(levels(*quantise(x, bits), bits), torch.zeros_like(x))
    assert levels(*quantise(torch.full((9,), 1e-6), bits), bits).abs().min() > 0


@pytest.mark.parametrize("size", [1, 5, 8, 256])
@pytest.mark.parametrize("bits", BITS)
def test_bytes_hold_the_codes(bits: int, size: int) -> None:
    codes = torch.randint(0, 2**bits, (3, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(codes, bits)
    assert packed.shape == (3, -(-size * bits // 8))
    assert torch.equal(unpack(packed, bits, size), codes)


def test_the_first_code_is_in_the_lowest_bits() -> None:
    assert pack(torch.tensor([3, 1], dtype=torch.uint8), 4).tolist() == [0x13]
    assert pack(torch.tensor([3, 1, 0, 2], dtype=torch.uint8), 2).tolist() == [0b10000111]
