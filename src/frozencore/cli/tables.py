"""Tables on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.adapter.bases.calibrate import Calibration
from frozencore.adapter.inspection import LayerReport
from frozencore.adapter.seal.card import allocation_in_words
from frozencore.lab.reports.labels import bases_name
from frozencore.lab.run.record import TunedRecord
from frozencore.lab.run.record_parts import AccuracyDetails
from frozencore.lab.run.rows import Reading
from frozencore.naming import num_of
from frozencore.sizes import bytes_in_words

LEGEND = {
    "m x n": "outputs by inputs of the layer",
    "coher. P": "coherence, the largest leverage of an output over its mean; 1 is even, m/r sits on single ones",
    "coher. Q": "the same of the inputs",
    "‖R‖": "how far the core was trained",
    "effective": "independent directions that were found; the rest of the rank are seeded random ones",
    "σ₁": "the constructor's largest singular value",
    "σ_r": "the last that the rank keeps",
    "σ₁(T)": "largest singular value of the whitened cross moment",
    "σ_r(T)": "the last that the rank keeps",
    "‖PᵀGQ‖": "norm of the gradient that the core sees",
    "of ‖G‖": "its share of the whole gradient's",
    "J": "squared correlation that the basis captures",
    "of best": "its share of the largest that a basis of this rank could capture",
    "max/med a": "largest over median second moment of the inputs: outlier channels",
    "max/med d": "the same of the output errors",
    "cos P": "mean cosine of the angles to the other basis, outputs; 1 is the same span",
    "cos Q": "the same of the inputs",
}


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
    cost = Text(
        f"{record.trainable_parameters:,} trained values; calibration {record.calibration_s:.1f} s, "
        f"training {record.training_s:.1f} s, peak memory {bytes_in_words(record.peak_memory_bytes)}"
    )
    bases = [*_chosen(record), *_spent(record)]
    said = [*_read(record), *bases, *_recipe(record), *_too_long(record), *_kept_step(record)]
    return Group(table, *words, *map(Text, said), cost)


def _read(record: TunedRecord) -> Iterator[str]:
    if record.rows is not None and record.rows.read is not None:
        yield Reading(record.rows.read, record.rows.columns, record.rows.left_out, record.rows.packed).in_words


def _chosen(record: TunedRecord) -> Iterator[str]:
    """What became of bases that were left open, and from what."""
    if (choice := record.choice) is None:
        return
    best = choice.compared[0]
    better = f", level with {bases_name(best.method, best.options)} ({best.gain:.4f})"
    level = better if best.gain > choice.gain else ""
    yield (
        f"Bases: {bases_name(choice.method, choice.options)}, chosen from {len(choice.compared)} by what a first step "
        f"gains on rows that it has not seen: {choice.gain:.4f} of {choice.loss:.3f} nats{level}; "
        f"{num_of(choice.rows, 'row')}, {choice.time_s:.1f} s."
    )


def _spent(record: TunedRecord) -> Iterator[str]:
    if record.allocation is not None:
        yield allocation_line(record.allocation.budget, record.allocation.ranks)


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


def recipe_in_words(num_steps: int, recipe: Mapping[str, Any], num_epochs: int | None = None) -> str:
    """A training in a line: its steps, the rows of one, its rounds, learning rate and warm-up.

    Args:
        recipe: As records have it.
        num_epochs: To be said too, of one that goes to its end.
    """
    laid_out = " without padding" if recipe.get("padding_free") else ""
    epochs = "" if num_epochs is None else f" in {num_of(num_epochs, 'epoch')}"
    return (
        f"{num_of(num_steps, 'step')} of {recipe['batch_size']} x {recipe['accumulation']} rows{laid_out}{epochs}"
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


def calibration_summary(calibration: Calibration) -> Group:
    """What calibration found, layer by layer."""
    table = Table(title=f"Calibration, {calibration.time_s:.1f} s", title_justify="left")
    columns = ("layer", "tokens", "rank", "effective", "σ₁", "σ_r", "max/med a", "max/med d")
    for heading in columns:
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=heading == "layer")
    for name, layer in calibration.layers.items():
        first, last = (layer.spectrum[0], layer.spectrum[-1]) if layer.spectrum else (None, None)
        numbers = (first, last, layer.input_spread, layer.error_spread)
        table.add_row(
            name, f"{layer.num_tokens:,}", str(layer.rank), str(layer.effective_rank),
            *("" if value is None else f"{value:.3g}" for value in numbers),
        )  # fmt: skip
    lines = []
    if calibration.rank_budget is not None:
        ranks = {name: layer.rank for name, layer in calibration.layers.items()}
        lines = [Text(allocation_line(calibration.rank_budget, ranks | dict.fromkeys(calibration.not_adapted, 0)))]
    return Group(table, *lines, _legend(columns))


def inspection_table(reports: Mapping[str, LayerReport]) -> Group:
    """A saved adapter's bases, layer by layer, and their totals."""
    some = next(iter(reports.values()))
    columns = ["layer", "m x n", "r", "coher. P", "coher. Q", "‖R‖"]
    if some.capture:
        columns += ["effective", "σ₁(T)", "σ_r(T)", "‖PᵀGQ‖", "of ‖G‖", "J", "of best", "max/med a", "max/med d"]
    if some.angles:
        columns += ["cos P", "cos Q"]
    table = Table(title="Bases", title_justify="left")
    for heading in columns:
        whole = heading in ("layer", "m x n")
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=whole)
    for name, report in reports.items():
        table.add_row(name, *_layer_cells(report))
    parameters = sum(report.basis.core_parameters for report in reports.values())
    basis_bytes = sum(report.basis.basis_bytes for report in reports.values())
    worst = max(report.basis.orthonormality_error for report in reports.values())
    return Group(
        table,
        _legend(columns),
        Text(
            f"{len(reports)} layers; {parameters:,} trained values ({4 * parameters:,} bytes), "
            f"bases {basis_bytes:,} bytes; largest |PᵀP - I| {worst:.1e}"
        ),
    )


def _legend(columns: Sequence[str]) -> Text:
    """What the abbreviated headings mean."""
    return Text("\n".join(f"{heading}: {LEGEND[heading]}" for heading in columns if heading in LEGEND), style="dim")


def _layer_cells(report: LayerReport) -> list[str]:
    basis, capture, angles = report.basis, report.capture, report.angles
    cells = [
        f"{basis.shape[0]} x {basis.shape[1]}", str(basis.rank), f"{basis.output_coherence:.1f}",
        f"{basis.input_coherence:.1f}", f"{basis.core_norm:.3g}",
    ]  # fmt: skip
    if capture:
        cells += [
            str(capture.effective_rank), f"{capture.singular_values[0]:.3g}", f"{capture.singular_values[-1]:.3g}",
            f"{capture.gradient_norm:.3g}", f"{capture.gradient_share:.0%}", f"{capture.correlation:.3g}",
            f"{capture.correlation_share:.0%}", f"{capture.input_spread:.1f}", f"{capture.error_spread:.1f}",
        ]  # fmt: skip
    if angles:
        cells += [f"{angles.output_cosine:.3f}", f"{angles.input_cosine:.3f}"]
    return cells


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f}"
