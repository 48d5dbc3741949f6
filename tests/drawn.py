"""Random anisotropic layers: tokens are drawn, and both moments (under test) and references are made from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from frozencore.constructors import LayerData
from frozencore.maths.moments import LayerMoments
from references import Array, Evidence


@dataclass(frozen=True)
class DrawnLayer:
    """Inputs X (N x n) and output errors E (N x m) of N tokens, and a weight W (m x n)."""

    X: Array
    E: Array
    W: Array

    def moments(self, dtype: torch.dtype = torch.float64) -> LayerMoments:
        """The moments that calibration would return."""
        X, E, Y = self.X, self.E, self.X @ self.W.T
        sums = {
            "cross": E.T @ X, "input_square": (X**2).sum(0), "error_square": (E**2).sum(0),
            "input_outer": X.T @ X, "error_outer": E.T @ E, "input_total": X.sum(0),
            "output_outer": Y.T @ Y, "output_total": Y.sum(0),
        }  # fmt: skip
        return LayerMoments(
            num_tokens=len(X), **{name: torch.tensor(value, dtype=dtype) for name, value in sums.items()}
        )

    def reference(self) -> Evidence:
        """The same, token by token, as means."""
        N, n = self.X.shape
        m = self.E.shape[1]
        e = Evidence(np.zeros((m, n)), np.zeros((n, n)), np.zeros((m, m)), self.W, np.zeros(n), np.zeros((m, m)),
                     np.zeros(m))  # fmt: skip
        for x, delta in zip(self.X, self.E, strict=True):
            y = self.W @ x
            e.G += np.outer(delta, x) / N
            e.A += np.outer(x, x) / N
            e.D += np.outer(delta, delta) / N
            e.x_mean += x / N
            e.Y += np.outer(y, y) / N
            e.y_mean += y / N
        return e

    def evidence(self, dtype: torch.dtype = torch.float64, name: str = "layer.0") -> LayerData:
        W = torch.tensor(self.W, dtype=dtype)
        return LayerData(name, self.W.shape, lambda: W, self.moments(dtype))


def drawn_layer(
    m: int = 12, n: int = 10, num_tokens: int = 150, seed: int = 0, spread: float = 1.5, mean: float = 0.4
) -> DrawnLayer:
    """Correlated tokens with coordinate scales from ``10^-spread`` to ``10^spread`` in a rotated frame."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(num_tokens, min(m, n) // 2 + 1))
    X = shared @ rng.normal(size=(shared.shape[1], n)) + rng.normal(size=(num_tokens, n)) + mean
    E = shared @ rng.normal(size=(shared.shape[1], m)) * 0.5 + rng.normal(size=(num_tokens, m))
    X *= 10 ** rng.uniform(-spread / 2, spread / 2, size=n)
    E *= 1e-2 * 10 ** rng.uniform(-spread / 2, spread / 2, size=m)
    return DrawnLayer(X, E, rng.normal(size=(m, n)))


def layer_of_rank(rank: int, m: int = 12, n: int = 10, seed: int = 0) -> DrawnLayer:
    """A layer whose cross moment, input and output error moments all have that rank."""
    rng = np.random.default_rng(seed)
    codes = rng.normal(size=(60, rank))
    X, E = codes @ rng.normal(size=(rank, n)), codes @ rng.normal(size=(rank, m))
    return DrawnLayer(X, E, rng.normal(size=(m, rank)) @ rng.normal(size=(rank, n)))
