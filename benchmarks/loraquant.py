"""LoRAs of one and two bits, as LoRAQuant rounds them (arXiv 2510.26690).

The update's singular pairs are split: the first ones have a share ``ratio`` of the squared norm and are rounded to
``bits`` between the smallest and the largest value of each group of a row, after steps of gradient descent on what the
rounding changes; of the others the signs are kept, times the mean magnitude of each group.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from tenant_study import Updates, product_svd

GROUP, STEPS, RATE = 64, 300, 1e-2


def loraquant(updates: Updates, bits: int, ratio: float) -> tuple[Updates, int]:
    """Rounded factors B (m x r) and A (r x n) of each layer, and their bits, with a float16 scale a group.

    The pairs before the one that reaches the share are the first ones (at least one), as in the authors' program.
    """
    pairs = {layer: split(*update, ratio) for layer, update in updates.items()}
    shapes: dict[tuple[int, int], list[str]] = {}
    for layer, (b, a, _) in pairs.items():
        shapes.setdefault((b.shape[1], a.shape[1]), []).append(layer)
    found, size = dict[str, tuple[Tensor, Tensor]](), 0
    for (m, n), layers in shapes.items():
        group = gcd(GROUP, m, n)
        counts = [pairs[layer][2] for layer in layers]
        tops = [torch.cat([pairs[layer][side][: pairs[layer][2]] for layer in layers]) for side in (0, 1)]
        ends = [uniform(side, bits, group).split(counts) for side in descended(tops[0], tops[1], bits, group)]
        for layer, x, y in zip(layers, *ends, strict=True):
            b, a, high = pairs[layer]
            B, A = (torch.cat([top, signs(side[high:], group)]) for top, side in ((x, b), (y, a)))
            found[layer] = B.mT.to(updates[layer][0].dtype), A.to(updates[layer][1].dtype)
            groups = (m + n) // group
            size += high * (bits * (m + n) + (16 + bits) * groups) + (len(b) - high) * (m + n + 16 * groups)
    return found, size


def split(B: Tensor, A: Tensor, ratio: float) -> tuple[Tensor, Tensor, int]:
    """The singular pairs of B A as rows of two matrices, the root of each value in both, and how many come first."""
    U, S, V = product_svd(B.double(), A.double())
    share = S.square().cumsum(0) / S.square().sum().clamp_min(1e-300)
    first = min(max(int((share < ratio).sum()), 1), len(S))
    return (S.sqrt() * U).mT, (S.sqrt() * V).mT, first


def uniform(rows: Tensor, bits: int, group: int) -> Tensor:
    """Each group of a row at 2^bits levels from its smallest to its largest value; zero is a level."""
    w = rows.reshape(-1, group)
    low, high, most = w.amin(1, keepdim=True), w.amax(1, keepdim=True), 2**bits - 1
    scale = (high - low).clamp_min(1e-5) / most
    zero = (-(low / scale).round()).clamp(0, most)
    return ((((w / scale).round() + zero).clamp(0, most) - zero) * scale).reshape(rows.shape)


def signs(rows: Tensor, group: int) -> Tensor:
    """The sign of each value, times the mean magnitude of its group."""
    w = rows.reshape(-1, group)
    return (w.sign() * w.abs().mean(1, keepdim=True)).reshape(rows.shape)


def descended(b: Tensor, a: Tensor, bits: int, group: int) -> list[Tensor]:
    """Pairs whose rounded products are nearer to ``b aᵀ``, by steps on the norm of each pair's error.

    Rounding has no slope, so the steps move the ends of each group's range.
    """
    sides = [b.clone().requires_grad_(), a.clone().requires_grad_()]
    squares = (b.square().sum(1), a.square().sum(1))
    for _ in range(STEPS):
        x, y = (uniform(side, bits, group) for side in sides)
        products = (b * x).sum(1) * (a * y).sum(1)
        errors = squares[0] * squares[1] - 2 * products + x.square().sum(1) * y.square().sum(1)
        slopes = torch.autograd.grad(errors.clamp_min(1e-24).sqrt().sum(), sides)
        with torch.no_grad():
            for side, slope in zip(sides, slopes, strict=True):
                side -= RATE * slope
    return [side.detach() for side in sides]
