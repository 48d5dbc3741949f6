"""Values of 8, 4 or 2 bits: uniform mid-rise levels (no level at zero) with one scale s a vector.

    x ≈ s·(q + 1/2 - 2^(b-1)),    q in 0 ... 2^b - 1

s minimises ``Σ (x - x̂)²``: for 2 bits exactly, for more bits among clips of the largest value, each followed by least
squares for its codes. s is a float16, and the codes are those of the rounded s. A vector that no such s is nearer to
than zeros has s = 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from jaxtyping import Float, UInt8

from frozencore.device import torch

BITS = (8, 4, 2)
Bits = Annotated[
    Literal[32, 8, 4, 2] | None,
    "Bits of a value of a saved core. With fewer than 32 each value is at the nearest level. Default: 4, or 8 "
    "below rank 16.",
]
LOST_TO_ROUNDING = 0.01
"""The share of an update from which commands say that rounding lost it."""
NUM_CLIPS, NUM_FITS = 16, 4
"""Clips from a quarter of the largest value to all of it, and least-squares steps after the best one."""


def default_bits(rank: int, own: int = 32) -> int:
    """The bits at which commands save a core: the fewest without a loss (docs/bits.md), at most its own."""
    return min(4 if rank >= 16 else 8, own)


def quantise(
    x: Float[torch.Tensor, "*b n"], bits: int
) -> tuple[UInt8[torch.Tensor, "*b n"], Float[torch.Tensor, "*b"]]:
    """Find the codes q (uint8) and the scale s (float16) of the lowest squared error, for each vector.

    Args:
        x: Finite values.
        bits: 8, 4 or 2.
    """
    x = x.double()
    largest = x.abs().amax(-1)
    scale, error = torch.zeros_like(largest), x.square().sum(-1)
    for candidate in [_exact_two_bit_scale(x)] if bits == 2 else _clipped_scales(x, bits, largest):
        rounded = _rounded(candidate)
        candidate_error = _error(x, rounded, bits)
        scale, error = torch.where(candidate_error < error, rounded, scale), torch.minimum(candidate_error, error)
    codes = _codes(x, scale, bits).masked_fill(scale.eq(0).unsqueeze(-1), 0)
    return codes, scale.half().cpu()


def largest_level(bits: int) -> float:
    """The largest value that any scale reaches."""
    return torch.finfo(torch.float16).max * (2 ** (bits - 1) - 0.5)


def levels(codes: UInt8[torch.Tensor, "*n"], scale: torch.Tensor, bits: int) -> Float[torch.Tensor, "*n"]:
    """The values of codes, in float32 (float64 for a scale of that dtype)."""
    dtype = torch.promote_types(scale.dtype, torch.float32)
    return (codes.to(dtype) + (0.5 - 2 ** (bits - 1))) * scale.to(codes.device, dtype)


def _codes(x: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x / scale.unsqueeze(-1)).floor() + 2 ** (bits - 1)).clamp(0, 2**bits - 1).to(torch.uint8)


def _error(x: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """The squared error of the nearest levels of each vector."""
    return (x - levels(_codes(x, scale, bits), scale.unsqueeze(-1), bits)).square().sum(-1)


def _rounded(scale: torch.Tensor) -> torch.Tensor:
    """The nearest float16 that is a number above zero, in float64."""
    half = torch.finfo(torch.float16)
    return scale.clamp(half.smallest_normal * half.eps, half.max).half().double()


def _clipped_scales(x: torch.Tensor, bits: int, largest: torch.Tensor) -> list[torch.Tensor]:
    """The scales of all clips, and those that least squares reaches from the best one."""
    clips = torch.linspace(0.25, 1, NUM_CLIPS, dtype=x.dtype).tolist()
    scales = [largest.clamp(min=torch.finfo(x.dtype).tiny) * clip / 2 ** (bits - 1) for clip in clips]
    errors = torch.stack([_error(x, scale, bits) for scale in scales])
    scale = torch.stack(scales).gather(0, errors.argmin(0, keepdim=True)).squeeze(0)
    for _ in range(NUM_FITS):
        steps = levels(_codes(x, scale, bits), torch.ones_like(scale).unsqueeze(-1), bits)
        scale = (x * steps).sum(-1) / steps.square().sum(-1)
        scales.append(scale)
    return scales


def _exact_two_bit_scale(x: torch.Tensor) -> torch.Tensor:
    """The best scale for levels ±s/2, ±3s/2.

    The k smallest magnitudes take s/2, the others 3s/2; for each k the best s is that of least squares.
    """
    n = x.shape[-1]
    k = torch.arange(n + 1, device=x.device)
    small = torch.nn.functional.pad(x.abs().sort(-1).values.cumsum(-1), (1, 0))
    products = small / 2 + 1.5 * (small[..., -1:] - small)  # Σ |x|·level, for s = 1
    squares = k / 4 + 2.25 * (n - k)
    best = (products.square() / squares).argmax(-1, keepdim=True)  # the error is Σ x² minus this
    return (products.gather(-1, best) / squares[best]).squeeze(-1)


def pack(codes: UInt8[torch.Tensor, "*b n"], bits: int) -> UInt8[torch.Tensor, "*b p"]:
    """Put 8 / bits codes into each byte, the first one lowest; the last byte is filled with zeros."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    padded = torch.nn.functional.pad(codes, (0, missing)).unflatten(-1, (-1, per_byte))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (padded << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: UInt8[torch.Tensor, "*b p"], bits: int, size: int) -> UInt8[torch.Tensor, "*b n"]:
    """Take ``size`` codes out of bytes."""
    if bits == 8:
        return packed[..., :size]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :size]
