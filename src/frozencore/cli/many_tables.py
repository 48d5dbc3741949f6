"""Tables on the screen of what trained side by side: many tenants, and the runs of a sweep."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.tune.run.record import Failure, Sweep, TunedRecord
from frozencore.words import bytes_in_words, num_of

RATE = "learning_rate"


def tenants_summary(outcomes: Mapping[str, TunedRecord | Failure]) -> Group:
    """Many tenants: what each was worth, and what they cost together."""
    table = Table(title=f"{len(outcomes)} tenants on one basis", title_justify="left")
    for heading in ("tenant", "rows", "steps", "held-out loss before", "after", "share, s"):
        table.add_column(heading, justify="left" if heading == "tenant" else "right")
    failures = []
    records = []
    for name, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            table.add_row(name, "", "", "", outcome.reason, "")
            failures.append(Text(f"{name}: {outcome.message}"))
            continue
        records.append(outcome)
        rows, steps = outcome.rows.trained if outcome.rows else 0, str(outcome.training.num_steps)
        if outcome.selection is not None and outcome.selection.kept_step != outcome.training.num_steps:
            steps = f"{outcome.selection.kept_step} of {steps}"
        losses = (outcome.held_out_loss_before, outcome.held_out_loss)
        table.add_row(
            name, str(rows), steps, *("" if loss is None else f"{loss:.3f}" for loss in losses),
            f"{outcome.training_s:.1f}",
        )  # fmt: skip
    if not records:
        return Group(table, *failures)
    cost = Text(
        f"{records[0].values_at_once:,} trained values each; calibration {records[0].calibration_s:.1f} s, "
        f"training {sum(record.training_s for record in records):.1f} s together, "
        f"peak memory {bytes_in_words(max(record.peak_memory_bytes for record in records))}"
    )
    return Group(table, *failures, cost)


def sweep_summary(sweep: Sweep) -> Table:
    """What each run of a sweep was worth on validation rows."""
    names = list(sweep.runs[0].options)
    title = f"{num_of(len(sweep.runs), 'run')} on one basis, {num_of(sweep.rows, 'validation row')}"
    table = Table(title=title, title_justify="left")
    for heading in (*names, "loss, nats/token", "kept step", ""):
        table.add_column(heading.replace("_", " "), justify="right")
    for number, run in enumerate(sweep.runs):
        loss = "diverged" if run.held_out_loss is None else f"{run.held_out_loss:.4f}"
        step = "" if run.kept_step is None else str(run.kept_step)
        mark = "" if number != sweep.best else "best †" if _at_end(sweep) else "best"
        table.add_row(*(f"{run.options[name]:g}" for name in names), loss, step, mark)
    if _at_end(sweep):
        table.caption = "† The largest or the smallest learning rate of the sweep: a better one may lie beyond it."
    return table


def _at_end(sweep: Sweep) -> bool:
    """Whether the best run has the largest or the smallest of several learning rates."""
    best = sweep.runs[sweep.best].options
    if RATE not in best:
        return False
    rates = [run.options[RATE] for run in sweep.runs if {**run.options, RATE: best[RATE]} == best]
    return len(rates) > 1 and best[RATE] in (min(rates), max(rates))
