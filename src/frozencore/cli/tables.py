"""Tables on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import sqrt
from statistics import mean, variance
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.adapter.saved.card import allocation_in_words
from frozencore.tune.run.record import TunedRecord
from frozencore.tune.run.record_parts import AccuracyDetails
from frozencore.tune.run.rows import Reading
from frozencore.words import bytes_in_words, num_of

STILL_FALLING = 0.1  # of the loss, from one quarter of the steps to the next


def run_summary(record: TunedRecord) -> Group:
    """One run: what it was worth, and what it cost."""
    table = Table(title=f"{record.method} on {record.task or record.config.data}", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    words = []
    if record.accuracy is not None and record.accuracy_before is not None and record.score is not None:
        after = f"{percent(record.accuracy)} ± {100 * record.score.standard_error:.1f}"
        table.add_row("accuracy, %", percent(record.accuracy_before), after)
        words = [Text(verdict(record.accuracy, record.accuracy_before, record.score))]
    losses = (record.held_out_loss_before, record.held_out_loss)
    table.add_row("held-out loss, nats/token", *("" if loss is None else f"{loss:.3f}" for loss in losses))
    for name, other in (record.forgetting or {}).items():
        rises = ("" if loss is None else f"{loss:.3f}" for loss in (other.loss_before, other.loss))
        table.add_row(f"loss on texts of {name}, nats/token", *rises)
    cost = Text(
        f"{values_in_words(record.values_at_once, record.values_in_all)}; "
        f"{bytes_in_words(record.state_held_bytes)} of state held while training; "
        f"saved in {bytes_in_words(record.saved_bytes)}, the base model has {bytes_in_words(record.model_bytes)}\n"
        f"calibration {record.calibration_s:.1f} s, training {record.training_s:.1f} s, "
        f"peak memory {bytes_in_words(record.peak_memory_bytes)}"
    )
    parts = (_read, _spent, _recipe, _falling, _private, _too_long, _kept_step)
    return Group(table, *words, *(Text(line) for part in parts for line in part(record)), cost)


def values_in_words(at_once: int, in_all: int) -> str:
    """How many values trained; with the number in all where rounds have trained others."""
    said = num_of(at_once, "trained value")
    return said if in_all == at_once else f"{said} at once, {in_all:,} in all"


def _read(record: TunedRecord) -> Iterator[str]:
    if record.rows is not None and record.rows.read is not None:
        yield Reading(record.rows.read, record.rows.columns, record.rows.left_out, record.rows.packed).in_words


def _spent(record: TunedRecord) -> Iterator[str]:
    if record.allocation is not None:
        yield allocation_line(record.allocation.budget, record.allocation.ranks)


def _private(record: TunedRecord) -> Iterator[str]:
    if (own := record.private) is not None:
        yield (
            f"Private: epsilon {own.spent:.3f} of {own.epsilon:g} spent at delta {own.delta:g}, for the rows trained "
            "on. Held-out rows are scored without noise, and no samples of them are kept."
        )


def allocation_line(budget: int, ranks: Mapping[str, int]) -> str:
    """What a rank budget bought, and which layers got nothing."""
    without = [name for name, rank in ranks.items() if not rank]
    more = f" and {len(without) - 2} more" if len(without) > 2 else ""
    unadapted = f"; not adapted: {', '.join(without[:2])}{more}" if without else ""
    return f"Ranks {allocation_in_words(budget, ranks)}{unadapted}."


def _recipe(record: TunedRecord) -> Iterator[str]:
    """What the run was trained with, most of which its method chose where nobody did."""
    if record.resolved is not None:
        yield recipe_in_words(record.training.num_steps, record.resolved.recipe)


def _falling(record: TunedRecord) -> Iterator[str]:
    """Whether the training loss was still going down at the end, and what to try then."""
    losses = [loss for loss in record.training.losses if loss is not None]
    quarter = len(losses) // 4
    if quarter < 2 or record.resolved is None:
        return
    before, last = losses[-2 * quarter : -quarter], losses[-quarter:]
    drop, error = mean(before) - mean(last), sqrt((variance(before) + variance(last)) / quarter)
    if drop > max(STILL_FALLING * mean(before), 2 * error):
        epochs = record.resolved.recipe["epochs"]
        yield (
            f"The training loss was still falling: {mean(last):.3f} in the last quarter of the steps, "
            f"{mean(before):.3f} in the one before. Try --epochs {2 * epochs} or a larger --lr."
        )


def recipe_in_words(num_steps: int, recipe: Mapping[str, Any], num_epochs: int | None = None) -> str:
    """A training in a line: its steps, the rows of one, its rounds, learning rate and warm-up.

    Args:
        recipe: As records have it.
        num_epochs: To be said too, of one that goes to its end.
    """
    laid_out = " without padding" if recipe.get("padding_free") else ""
    epochs = "" if num_epochs is None else f" in {num_of(num_epochs, 'epoch')}"
    at_once, rows = recipe["batch_size"], recipe["batch_size"] * recipe["accumulation"]
    cut = "" if at_once == rows else f", {at_once} at a time"
    return (
        f"{num_of(num_steps, 'step')} of {num_of(rows, 'row')}{cut}{laid_out}{epochs}"
        f"{_in_rounds(recipe.get('refresh', 1))}; learning rate {recipe['learning_rate']:g}, "
        f"warm-up {recipe['warmup']:g} of them."
    )


def _in_rounds(rounds: int | str) -> str:
    if rounds == "auto":
        return ", in as many rounds as pay"
    return "" if rounds == 1 else f", in {rounds} rounds"


def _too_long(record: TunedRecord) -> Iterator[str]:
    """How many rows lost the beginning of their prompt, and how many were left out, where that was allowed."""
    if record.rows is not None and record.rows.cut:
        yield f"{num_of(record.rows.cut, 'prompt')} cut at the beginning (--truncate)."
    if record.rows is not None and record.rows.skipped and record.rows.read is None:
        was = "was" if record.rows.skipped == 1 else "were"
        yield f"{num_of(record.rows.skipped, 'row')} {was} too long and left out (--skip-long)."


def _kept_step(record: TunedRecord) -> Iterator[str]:
    """Which step's values were kept, where that was to be chosen."""
    chosen, last = record.selection, record.training.num_steps
    if chosen is None:
        return
    if chosen.by is None:
        yield f"No rows to validate on beside those trained on: the last of {last} steps is kept."
        return
    best = next(score for score in chosen.scores if score.step == chosen.kept_step)
    value = f"loss {best.held_out_loss:.3f}" if best.accuracy is None else f"accuracy {percent(best.accuracy)} %"
    yield (
        f"Kept step {chosen.kept_step} of {last}: {value} on {chosen.rows} validation rows, the best of "
        f"{len(chosen.scores)} scores, which took {chosen.time_s:.1f} s."
        + (" Then they were no better (--patience)." if chosen.stopped_early else "")
    )


def verdict(accuracy: float, before: float, details: AccuracyDetails) -> str:
    """In words: whether a run beats the majority class, or the base model where there are no classes."""
    majority = details.majority_class
    floor, name = (majority, "the majority class") if majority is not None else (before, "the base model")
    if accuracy <= floor:
        return f"Does not beat {name} ({percent(floor)} %)."
    sure = "clearly" if accuracy - 2 * details.standard_error > floor else "within two standard errors"
    return f"Beats {name} ({percent(floor)} %), {sure}."


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f}"
