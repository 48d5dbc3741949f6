"""benchmarks/federated_tables.py: its differences are paired by seed, and their intervals are Student's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(contestant: str, accuracy: float, loss: float, errors: list[float]) -> dict[str, Any]:
    curve = [{"round": 1, "accuracy": 0.5, "loss": 2.0}, {"round": 2, "accuracy": accuracy, "loss": loss}]
    about = {"contestant": contestant, "values": 16, "bytes": 64_000, "rate": 0.01}
    return about | {"curve": curve, "averaging_errors": errors}


def test_the_tables_hold_paired_differences_and_the_error_of_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import federated_tables as tables

    losses = {"core": [0.5, 0.7, 0.6], "LoRA": [0.9, 1.3, 0.95]}
    rows = [
        run(name, 0.75, loss, [0.0, 0.0] if name == "core" else [0.1, 0.2])
        for seed in range(3)
        for name, loss in ((name, losses[name][seed]) for name in losses)
    ]
    search = [
        {"contestant": name, "rate": rate, "loss": rate, "chosen": rate == 0.01}
        for name in losses
        for rate in (0.01, 0.02)
    ]
    plan = {"clients_a_round": 5}
    found = {"plan": plan, "base": {"accuracy": 0.5, "loss": 4.0}, "rows": rows, "search": search}
    low, high = ttest_rel(losses["LoRA"], losses["core"]).confidence_interval()
    ended = tables.ended(found)
    assert f"+0.450 ({low:+.3f} to {high:+.3f}) | 15 % |" in ended
    assert "| core | 16 | 64 KB | 0.64 MB | 0.01 | 75.0 ± 0.0 |  | 0.600 ± 0.100 |  | none |" in ended
    assert "| LoRA | 50.0 / 2.00 | 75.0 / 1.05 |" in tables.by_round(found)
    assert "| core | **0.010** | 0.020 |" in tables.searched(found)
