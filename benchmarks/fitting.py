"""Constants of cost: seconds per operation and per call, fitted to measured points by non-negative least squares.

Each equation is divided by a whole measured time T, so that all points weigh alike: ``min Σ (Xc - t)²/T²``, ``c ≥ 0``.
What is fitted, t, is that time or a part of it: a small difference between two large times carries the noise of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

Rows = Sequence[Mapping[str, Any]]


def fit(
    terms: Mapping[str, Sequence[float]], times: Sequence[float], whole: Sequence[float] | None = None
) -> dict[str, float]:
    """A constant a term, and how far the fitted times are from the measured ones, as shares of the whole times.

    Args:
        whole: T; the fitted times themselves by default.
    """
    T = np.array(whole or times)
    X, t = np.array(list(terms.values()), dtype=float).T / T[:, None], np.array(times) / T
    scale = np.maximum(X.max(axis=0), 1e-300)  # operations and calls are nine orders of magnitude apart
    constants = nnls(X / scale, t)[0] / scale
    error = np.abs(X @ constants - t)
    found = dict(zip(terms, map(float, constants), strict=True))
    return found | {"median_error": float(np.median(error)), "largest_error": float(error.max())}


def fit_constants(calibration: Rows, step: Rows) -> dict[str, dict[str, float]]:
    """Constants of the plain pass, of what collecting adds to it, of the bases, and of a core and LoRA in a step.

    Args:
        calibration, step: Rows of benchmarks/growth.py: medians of times beside counts of operations and calls.
            ``block_activations`` is tokens times layers times hidden and intermediate size: what element-wise work
            grows with.
    """

    def fitted(rows: Rows, what: str, beyond: str | None = None, **terms: str) -> dict[str, float]:
        """Seconds of ``what``, or those beyond another column, by columns or products of two of them."""
        whole = [row[what] for row in rows]
        times = [row[what] - (row[beyond] if beyond else 0.0) for row in rows]
        columns = {
            name: [float(np.prod([row[factor] for factor in factors.split(" x ")])) for row in rows]
            for name, factors in terms.items()
        }
        return fit(columns, times, whole)

    return {
        "pass": fitted(
            calibration, "floor_s", per_operation_s="pass_operations", per_activation_s="block_activations",
            per_layer_and_batch_s="num_layers x num_batches",
        ),
        "products": fitted(
            calibration, "collect_s", "floor_s", per_operation_s="product_operations",
            per_target_and_batch_s="num_targets x num_batches",
        ),
        "bases": fitted(
            calibration, "build_s", per_krylov_operation_s="krylov_operations", per_gram_operation_s="gram_operations",
            per_target_s="num_targets",
        ),
        "core": fitted(step, "frozencore_s", "floor_s", per_operation_s="core_operations", per_target_s="num_targets"),
        "lora": fitted(step, "lora_s", "floor_s", per_operation_s="lora_operations", per_target_s="num_targets"),
    }  # fmt: skip
