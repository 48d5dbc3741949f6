"""Federated averaging on SmolLM2: the tables of its page, from the results of ``federated_smollm2.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t

from harness import table

Found = Mapping[str, Any]


def runs_of(found: Found) -> dict[str, list[Any]]:
    """The runs by contestant, in the order of their seeds."""
    runs: dict[str, list[Any]] = {}
    for run in found["rows"]:
        runs.setdefault(run["contestant"], []).append(run)
    return runs


def difference(values: Sequence[float], others: Sequence[float], digits: int) -> str:
    """The mean difference over the seeds and its 95 % interval by Student's t."""
    each = [one - other for one, other in zip(values, others, strict=True)]
    middle = fmean(each)
    half = t.ppf(0.975, len(each) - 1) * stdev(each) / len(each) ** 0.5
    return f"{middle:+.{digits}f} ({middle - half:+.{digits}f} to {middle + half:+.{digits}f})"


def last(runs: Sequence[Any], measure: str, times: float = 1.0) -> list[float]:
    return [times * run["curve"][-1][measure] for run in runs]


def ended(found: Found) -> str:
    """After the last round: accuracy and loss, and their differences from the first contestant's.

    In a round each of its clients receives the average and sends its own values back.
    """
    by_contestant = runs_of(found)
    first = next(iter(by_contestant.values()))
    base, exchanges = found["base"], 2 * found["plan"]["clients_a_round"]
    rows = [["base model", "", "", "", "", f"{100 * base['accuracy']:.1f}", "", f"{base['loss']:.3f}", "", ""]]
    for name, runs in by_contestant.items():
        sent = runs[0]["bytes"]
        cells = [name, f"{runs[0]['values']:,}", f"{sent / 1e3:,.0f} KB", f"{exchanges * sent / 1e6:,.2f} MB"]
        cells.append(f"{runs[0]['rate']:g}")
        for measure, times, digits in (("accuracy", 100.0, 1), ("loss", 1.0, 3)):
            values, others = (last(one, measure, times) for one in (runs, first))
            cells.append(f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}")
            cells.append("" if runs is first else difference(values, others, digits))
        error = fmean(fmean(run["averaging_errors"]) for run in runs)
        rows.append([*cells, f"{100 * error:.0f} %" if error else "none"])
    heads = ["clients train", "values", "a client sends", "a round, both ways", "learning rate"]
    scored = ["accuracy, %", "minus the first", "loss", "minus the first"]
    return table([*heads, *scored, "error of the average"], rows)


def by_round(found: Found) -> str:
    """Mean accuracy and loss over the seeds, as the rounds go on."""
    runs = runs_of(found)
    numbers = [point["round"] for point in found["rows"][0]["curve"]]
    rows = [
        [name, *(f"{100 * fmean(run['curve'][i]['accuracy'] for run in own):.1f} / "
                 f"{fmean(run['curve'][i]['loss'] for run in own):.2f}" for i in range(len(numbers)))]
        for name, own in runs.items()
    ]  # fmt: skip
    return table(["accuracy, % / loss after round", *map(str, numbers)], rows)


def searched(found: Found) -> str:
    """The validation losses by rate; the chosen one is bold."""
    rates = sorted({row["rate"] for row in found["search"]})
    rows = []
    for name in runs_of(found):
        own = {row["rate"]: row for row in found["search"] if row["contestant"] == name}
        marks = {rate: "**" if row["chosen"] else "" for rate, row in own.items()}
        rows.append(
            [name, *(f"{marks[rate]}{own[rate]['loss']:.3f}{marks[rate]}" if rate in own else "" for rate in rates)]
        )
    return table(["validation loss at rate", *(f"{rate:g}" for rate in rates)], rows)


def block(found: Found) -> str:
    return "\n".join([ended(found), by_round(found), searched(found)])
