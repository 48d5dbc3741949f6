"""Does one learning rate serve all ranks if the scale is s = 16/r?  Rate x rank x targets on two models.

    nice python benchmarks/scale.py --data-root DIR --model DIR      # about an hour;  --quick: one tiny round

``--model`` is ``tiny1m``, on HellaSwag's texts; the pocket model, on its arithmetic, is in the package. The rates of a
row train side by side on one basis. Under AdamW a scale s at a rate η is a scale of 1 at the rate s·η
(``tests/adapter/test_scale.py``), so that one training is a point in both columns of the figure. But for clipping: a
scale multiplies the gradients that are clipped at 1. The row with ``alpha`` null was trained at a scale of 1 and the
same steps to see what that makes. A rank budget has ranks of its own in every layer: it was trained both ways.

Losses are held-out nats per completion token, of one seed. What is there already in ``--out`` is not trained again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peft import get_peft_model
from rich.console import Console
from rich.table import Table

from frozencore import FrozenCoreConfig, calibrate
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run.config import make_config
from frozencore.tune.run.prepare import PreparedRun, calibration_batches, prepare
from frozencore.tune.training.many.losses import held_out_losses
from frozencore.tune.training.many.slots import CoreStack
from frozencore.tune.training.many.tenant import Tenant
from frozencore.tune.training.many.train import train_many
from frozencore.tune.training.recipe import Recipe
from harness import RESULTS, parser_of, write_found

ALPHA = 16.0  # s = 16 / r: at the paper's rank the paper's scale
RATES = {"tiny1m": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2), "pocket": (1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1)}
TASKS = {"tiny1m": "hellaswag-text", "pocket": "pocket-math"}
TARGETS = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "all-linear": "all-linear"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The size of the job."""

    ranks: tuple[int, ...] = (6, 12, 24, 48)
    budgets: tuple[int, ...] = (1024, 4096)
    num_train: int = 400
    num_held_out: int = 100
    num_calibration: int = 64
    batch_size: int = 8
    max_length: int = 64


QUICK = Plan(ranks=(2, 4), budgets=(64,), num_train=16, num_held_out=2, num_calibration=4, max_length=64)


def wanted(plan: Plan) -> Iterator[Row]:
    """The settings of the rows, the most important first."""
    for targets in reversed(TARGETS):
        for rank in sorted(plan.ranks, key=lambda rank: -abs(rank - 16)):
            yield {"targets": targets, "rank": rank, "budget": None, "alpha": ALPHA}
    for budget in plan.budgets:
        for alpha in (None, ALPHA):
            yield {"targets": "all-linear", "rank": None, "budget": budget, "alpha": alpha}
    yield {"targets": "all-linear", "rank": plan.ranks[-1], "budget": None, "alpha": None}


def bench_of(model: str, place: str, data_root: Path | None, plan: Plan) -> PreparedRun:
    return prepare(
        make_config(
            model=place, task=TASKS[model], data_root=data_root, num_train=plan.num_train, truncate=True, device="cpu",
            num_evaluation=plan.num_held_out, max_length=plan.max_length, calibration_size=plan.num_calibration,
        ),
        lambda *_: None,
    )  # fmt: skip


def losses_of(row: Row, prepared: PreparedRun, plan: Plan) -> list[float | None]:
    """Held-out loss at each rate; None where it diverged."""
    ranks = {"r": row["rank"]} if row["budget"] is None else {"rank_budget": row["budget"]}
    config = FrozenCoreConfig(
        **ranks, alpha=row["alpha"], target_modules=TARGETS[row["targets"]], coordinates="qr", damping=0.1, seed=42
    )
    model = get_peft_model(prepared.model, config)
    try:
        calibrate(model, calibration_batches(prepared.rows.calibration, prepared.encoder.pad_id), progress=False)
        if row["alpha"] is None and row["budget"] is None:  # the same steps at a scale of 1
            rates = [rate * ALPHA / row["rank"] for rate in RATES[row["model"]]]
        else:
            rates = list(RATES[row["model"]])
        tenants = {
            str(number): Tenant(prepared.rows.train, Recipe(rate, 0.1, batch_size=plan.batch_size, accumulation=1))
            for number, rate in enumerate(rates)
        }
        trained = train_many(model, tenants, pad_id=prepared.encoder.pad_id)
        stack = CoreStack(model, len(trained))
        for slot, one in enumerate(trained.values()):
            stack.put(slot, one.cores)
        losses = held_out_losses(
            model, [prepared.rows.held_out] * len(trained), pad_id=prepared.encoder.pad_id, through=stack.rows
        )
        fine = [one.diverged is None for one in trained.values()]
        return [round(loss, 5) if ok else None for loss, ok in zip(losses, fine, strict=True)]
    finally:
        model.unload()


def one_rate(rows: list[Row], *, scaled: bool) -> Row | None:
    """The one rate that serves all ranks and targets of a model best, and what each row loses there to its own best.

    Between the rates of a row its loss is taken as straight in the logarithm of the rate; rates beyond those that some
    row was trained at do not count.

    Args:
        scaled: Rates at a scale of 16/r, else what they are worth at a scale of 1.
    """
    curves = []
    for row in rows:
        if row["rank"] is not None and row["alpha"] is not None:
            factor = 1.0 if scaled else ALPHA / row["rank"]
            known = [
                (rate * factor, loss) for rate, loss in zip(RATES[row["model"]], row["losses"], strict=True) if loss
            ]
            curves.append(tuple(np.array(known).T))
    if len(curves) < 2:
        return None
    span = max(rates[0] for rates, _ in curves), min(rates[-1] for rates, _ in curves)
    grid = np.geomspace(*span, 49)
    excess = np.stack([np.interp(np.log(grid), np.log(rates), losses) - losses.min() for rates, losses in curves])
    best = int(excess.mean(0).argmin())
    return {
        "rate": round(float(grid[best]), 5),
        "mean_excess": round(float(excess[:, best].mean()), 5),
        "largest_excess": round(float(excess[:, best].max()), 5),
        "best_rates": [round(float(rates[losses.argmin()]), 5) for rates, losses in curves],
    }


def table_of(rows: list[Row]) -> Table:
    table = Table(title="Held-out loss by rate", title_justify="left")
    for heading in ("model", "targets", "rank", "scale", *(f"rate {number}" for number in range(1, 6))):
        table.add_column(heading, justify="right")
    for model, rates in RATES.items():
        table.add_row(model, "", "", "", *(f"{rate:g}" for rate in rates))
    for row in rows:
        known = [loss for loss in row["losses"] if loss is not None]
        rank = f"budget {row['budget']}" if row["rank"] is None else str(row["rank"])
        scale = "1" if row["alpha"] is None else "16/r"
        scale += ", rates x 16/r" if row["alpha"] is None and row["budget"] is None else ""
        cells = (
            "diverged" if loss is None else f"[bold]{loss:.3f}[/]" if loss == min(known) else f"{loss:.3f}"
            for loss in row["losses"]
        )
        table.add_row(row["model"], row["targets"], rank, scale, *cells)
    return table


def one_rates(rows: list[Row]) -> Row:
    """The one rate of each model, at a scale of 1 and of 16/r."""
    by_model = {model: [row for row in rows if row["model"] == model] for model in RATES}
    return {
        model: {scale: one_rate(own, scaled=scale == "16/r") for scale in ("1", "16/r")}
        for model, own in by_model.items()
    }


def main() -> None:
    parser = parser_of(__doc__, "scale")
    parser.add_argument("--model", help="Folder of tiny1m; left out without it.")
    parser.add_argument("--data-root", type=Path)
    given = parser.parse_args()
    plan, out = (QUICK if given.quick else Plan()), given.out or RESULTS / "scale.json"
    rows: list[Row] = [] if given.quick or not out.exists() else json.loads(out.read_text())["rows"]
    done = [{name: value for name, value in row.items() if name != "losses"} for row in rows]
    places = ({"tiny1m": given.model} if given.model else {}) | {"pocket": str(pocket_model_path())}
    benches = {model: bench_of(model, place, given.data_root, plan) for model, place in places.items()}
    for job in wanted(plan):
        for model, prepared in benches.items():
            row = {"model": model, **job}
            if row in done:
                continue
            rows.append({**row, "losses": losses_of(row, prepared, plan)})
            write_found(given, rates=RATES, plan=vars(plan), rows=rows, one_rate=one_rates(rows))
    Console().print(table_of(rows))


if __name__ == "__main__":
    main()
