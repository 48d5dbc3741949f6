"""Constants of cost: seconds per operation and per call, fitted to measured points by non-negative least squares.

Each equation is divided by a whole measured time T, so that all points weigh alike: ``min Σ (Xc - t)²/T²``, ``c ≥ 0``.
What is fitted, t, is that time or a part of it: a small difference between two large times carries the noise of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls


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


def fit_constants(
    calibration: Sequence[Mapping[str, Any]], step: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Of the plain pass, of what collecting adds to it, of the bases, and of what a core or LoRA adds to a step.

    Args:
        calibration, step: Rows of benchmarks/growth.py: medians of times beside counts of operations and calls.
            ``block_activations`` is tokens times layers times hidden and intermediate size: what element-wise work
            grows with.
    """

    def column(rows: Sequence[Mapping[str, Any]], *factors: str) -> list[float]:
        return [float(np.prod([row[name] for name in factors])) for row in rows]

    def difference(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
        return [row[name] - row["floor_s"] for row in rows]

    return {
        "pass": fit(
            {
                "per_operation_s": column(calibration, "pass_operations"),
                "per_activation_s": column(calibration, "block_activations"),
                "per_layer_and_batch_s": column(calibration, "num_layers", "num_batches"),
            },
            column(calibration, "floor_s"),
        ),
        "products": fit(
            {
                "per_operation_s": column(calibration, "product_operations"),
                "per_target_and_batch_s": column(calibration, "num_targets", "num_batches"),
            },
            difference(calibration, "collect_s"),
            column(calibration, "collect_s"),
        ),
        "bases": fit(
            {
                "per_krylov_operation_s": column(calibration, "krylov_operations"),
                "per_gram_operation_s": column(calibration, "gram_operations"),
                "per_target_s": column(calibration, "num_targets"),
            },
            column(calibration, "build_s"),
        ),
        "core": fit(
            {
                "per_operation_s": column(step, "core_operations"),
                "per_target_s": column(step, "num_targets"),
            },
            difference(step, "frozencore_s"),
            column(step, "frozencore_s"),
        ),
        "lora": fit(
            {
                "per_operation_s": column(step, "lora_operations"),
                "per_target_s": column(step, "num_targets"),
            },
            difference(step, "lora_s"),
            column(step, "lora_s"),
        ),
    }
