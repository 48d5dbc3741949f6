"""What a study's search chose, as a sheet."""

from __future__ import annotations

from collections.abc import Mapping

from frozencore_lab.campaign.results import StudyResults
from frozencore_lab.campaign.study_options import Value
from frozencore_lab.reports.labels import axis_name, full_name, value_name
from frozencore_lab.reports.sheets.sheet import Sheet, label, number

AT_END = "†"
SAID_OF_END = f"{AT_END}: the largest or the smallest learning rate that was tried, so a better one may lie beyond it."


def search_sheet(results: StudyResults) -> Sheet:
    """What the search chose for each group, with every trial's score on the validation rows."""
    search = results.study.search
    assert search is not None
    by_accuracy = search.select == "accuracy"
    known = results.choices[0][0]
    axes = [axis for axis in known if len(results.study.axes.get(axis, ())) > 1]
    axes = axes or ["method" if "method" in known else "task"]
    rows = []
    for group, choice in results.choices:
        scores = [score for options, score in choice.trials if options == choice.options]
        trials = "; ".join(f"{_options(options)}: {_score(score, by_accuracy)}" for options, score in choice.trials)
        chosen = _options(choice.options) + f" {AT_END}" * choice.at_end
        rows.append((
            *(label(value_name(axis, group[axis])) for axis in axes), label(chosen),
            number(None if scores[0] is None else (100 if by_accuracy else 1) * scores[0], 1 if by_accuracy else 3),
            label(trials),
        ))  # fmt: skip
    said = f" {SAID_OF_END}" * any(choice.at_end for _, choice in results.choices)
    measure = "accuracy, %" if by_accuracy else "held-out loss, nats per token"
    return Sheet(
        f"{results.name}-search", f"{results.study.title}: what the search chose",
        f"On held-out validation rows with seed {search.seed}, once for all seeds; {measure}.{said}",
        (*map(axis_name, axes), "chosen", "score", "all trials"), tuple(rows), num_labels=len(axes) + 1,
    )  # fmt: skip


def _score(score: float | None, by_accuracy: bool) -> str:
    return "failed" if score is None else f"{100 * score:.1f}" if by_accuracy else f"{score:.3f}"


def _options(options: Mapping[str, Value]) -> str:
    return ", ".join(full_name(axis, value) for axis, value in options.items()) or "as given"
