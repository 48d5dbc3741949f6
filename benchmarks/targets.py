"""The targets of the speed work against what the benchmarks measured, one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from cost_tables import calibration_over_floor, rows_of_sweep

Parts = Mapping[str, Mapping[str, Any]]
OURS = "frozencore fcca"


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    is_reached: None where a part that is needed has not run, or has failed.
    """

    what: str
    target: str
    measured: str
    is_reached: bool | None


def check_targets(parts: Parts) -> list[Verdict]:
    """Every target's verdict.

    Args:
        parts: By script, what it wrote; one that failed holds ``error``.
    """
    return [_verdict(parts, *row) for row in TARGETS]


def _verdict(
    parts: Parts, what: str, target: str, measure: Callable[[Parts], float], limit: float, shown: str
) -> Verdict:
    try:
        value = measure(parts)
    except (KeyError, ValueError):  # a part is missing, or it left out what is asked for
        return Verdict(what, target, "", None)
    return Verdict(what, target, shown.format(value), value <= limit)


def _steps(parts: Parts, targets: str) -> list[Mapping[str, Any]]:
    rows = parts["step"]["rows"]
    return [row for row in rows if row["contestant"] == "frozencore" and row["targets"] == targets]


def _step_over(reference: str, targets: str) -> Callable[[Parts], float]:
    """The worst of the batch shapes."""
    return lambda parts: max(row[reference][0] for row in _steps(parts, targets))


def _saved(parts: Parts) -> float:
    return max(row["saved_over_floor"] for row in _steps(parts, "attention"))


def _state_bytes(parts: Parts) -> float:
    rows = [row for row in parts["step"]["rows"] if row["contestant"] == "frozencore"]
    return max(row["training_state_bytes"] / row["num_trainable"] for row in rows)


def _calibration_over(reference: str) -> Callable[[Parts], float]:
    def ratio(parts: Parts) -> float:
        found = (parts.get(part, {}).get("rows", []) for part in ("calibration", "calibration_eva"))
        medians = {row["contestant"]: row["median_s"] for rows in found for row in rows}
        return medians[OURS] / medians[reference]

    return ratio


def calibration_by_width(growth: Mapping[str, Any]) -> dict[int, float]:
    """Time of a calibration over that of its floor in the sweep over widths."""
    return {row["width"]: calibration_over_floor(row) for row in rows_of_sweep(growth, "width")}


def _calibration_of_any_width(parts: Parts) -> float:
    return max(calibration_by_width(parts["growth"]).values())


def _svd_rows(parts: Parts) -> dict[str, Mapping[str, Any]]:
    return {row["method"]: row for row in parts["svd"]["rows"] if list(row["shape"]) == [2048, 2048]}


def _svd_time(parts: Parts) -> float:
    rows = _svd_rows(parts)
    return median(rows["frozencore"]["runs_s"]) / median(rows["torch.linalg.svd"]["runs_s"])


def _lost_cosine(parts: Parts) -> float:
    return max(1 - row["cosine"] for row in parts["svd"]["rows"] if row["method"] == "frozencore")


def _swap(parts: Parts) -> float:
    return parts["step"]["adapter_of_144_layers"]["swap_prepared_s"] * 1e3


def _budget(parts: Parts) -> float:
    return max(row["share"] for row in parts["memory"]["rows"])


TARGETS: list[tuple[str, str, Callable[[Parts], float], float, str]] = [
    ("training step / floor, attention", "<= 1.03", _step_over("over_floor", "attention"), 1.03, "{:.3f}"),
    ("training step / PEFT LoRA, attention", "<= 0.95", _step_over("over_lora", "attention"), 0.95, "{:.3f}"),
    ("training step / PEFT LoRA, all linear", "<= 1", _step_over("over_lora", "all-linear"), 1.0, "{:.3f}"),
    ("saved activations over the floor, attention", "<= 0.5 %", _saved, 0.005, "{:.2%}"),
    ("gradient + optimiser bytes a core value", "<= 12", _state_bytes, 12, "{:g}"),
    ("calibration / its floor, widths 128 to 1024", "<= 1.20", _calibration_of_any_width, 1.20, "{:.3f}"),
    ("calibration / PEFT EVA", "<= 0.5", _calibration_over("PEFT EVA"), 0.5, "{:.3f}"),
    ("calibration / PEFT LoRA-GA", "<= 0.5", _calibration_over("PEFT LoRA-GA"), 0.5, "{:.3f}"),
    ("truncated / full SVD, 2048 x 2048", "<= 0.05", _svd_time, 0.05, "{:.3f}"),
    ("1 - mean principal cosine, slow spectra", "<= 1e-4", _lost_cosine, 1e-4, "{:.1e}"),
    ("peak memory of calibration / its budget", "<= 1.05", _budget, 1.05, "{:.3f}"),
    ("swap of a prepared core, 144 layers", "<= 1 ms", _swap, 1.0, "{:.2f} ms"),
]
