"""The options of every study by method (paper, table "hyperparams"): fixed, varied, or chosen by the search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from frozencore.tune.methods import AdapterOptions, Method, find_method, method_name
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.record import TunedRecord
from frozencore.tune.training.recipe import Recipe
from frozencore_lab.campaign.plan import Axes
from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.campaign.spec import Campaign, Study
from frozencore_lab.reports.labels import axis_name, value_name
from frozencore_lab.reports.sheets.sheet import Sheet, SheetCell, label

HEADINGS = (
    "study", "methods", "rank", "modules", "precision", "batch", "learning rate", "warm-up", "calibration", "further",
    "selection", "seeds", "values in all",
)  # fmt: skip
SHOWN_APART = (
    "model", "task", "method", "seed", "rank", "rank_budget", "targets", "dtype", "batch_size", "accumulation",
    "learning_rate", "warmup", "calibration_size",
)  # fmt: skip
"""Options that have a column of their own here, or in another table."""


def hyper_parameter_sheet(results: CampaignResults) -> Sheet:
    """A line for each study and set of methods that share all options."""
    rows = []
    for study in results.studies:
        by_options: dict[tuple[str, ...], list[str]] = {}
        for method in methods_of(results.campaign, study.study):
            texts = tuple(_Options(results.campaign, study.study, method).texts())
            by_options.setdefault(texts, []).append(method)
        for texts, methods in by_options.items():
            names = ", ".join(map(method_name, methods))
            rows.append((*map(label, (study.name, names, *texts)), _trained(study, methods)))
    recipe = {field.name: field.default for field in fields(Recipe)}
    return Sheet(
        "hyper-parameters",
        "Options by study and method",
        "{a, b}: chosen by the search on validation rows; a · b: varied. The same for all: AdamW with weight decay "
        f"{recipe['weight_decay']:g}, a cosine schedule after the warm-up, gradients clipped at "
        f"{recipe['max_grad_norm']:g}; cores start at zero.",
        HEADINGS,
        tuple(rows),
        num_labels=len(HEADINGS) - 1,
    )


def methods_of(campaign: Campaign, study: Study) -> list[str]:
    """The methods of a study, whether they are its axis, fixed, or the default."""
    default = RunConfig.model_fields["method"].default
    fixed = study.fixed.get("method", campaign.base.get("method", default))
    return [str(method) for method in study.axes.get("method", (fixed,))]


@dataclass(frozen=True)
class _Options:
    """The options of one method in a study, as texts."""

    campaign: Campaign
    study: Study
    method: str

    def texts(self) -> Iterator[str]:
        """From the rank to the seeds, in the order of the headings."""
        trains = self.study.kind.trains
        budget = self._values("rank_budget") != (None,)
        yield f"budget {self._text('rank_budget')}" if budget else self._text("rank")
        yield "attention" if self._values("targets") == (None,) else self._text("targets")
        yield self._text("dtype")
        size, times = (self._values(name)[0] for name in ("batch_size", "accumulation"))
        in_words = f"{times}, as they fit" if size == "auto" else f"{size} × {times} = {size * times}"
        yield in_words if trains else "-"
        yield self._text("learning_rate") if trains else "-"
        yield self._text("warmup") if trains else "-"
        yield self._text("calibration_size") if self._reads_data() else "reads none"
        yield "; ".join(f"{axis_name(name)} {self._text(name)}" for name in self._further()) or "-"
        yield self._selection()
        yield ", ".join(value_name("seed", seed) for seed in self.study.axes["seed"])

    @property
    def _row(self) -> Method:
        return find_method(self.study.method_of(self.method))

    @property
    def _given(self) -> dict[str, Any]:
        return self.campaign.options_of(self.study, {"method": self.method})

    @property
    def _grid(self) -> dict[str, tuple[Any, ...]]:
        return dict(self.study.search.grid(self.method)) if self.study.search else {}

    def _values(self, name: str) -> tuple[Any, ...]:
        """Every value that the option takes; of those that the search tries, one is chosen."""
        row = self._row
        own = {"learning_rate": row.learning_rate, "warmup": row.warmup}
        default = own.get(name, RunConfig.model_fields[name].default if name in RunConfig.model_fields else None)
        return self._grid.get(name) or self.study.axes.get(name) or (self._given.get(name, default),)

    def _text(self, name: str) -> str:
        values = [value_name(name, value) for value in self._values(name)]
        return "{" + ", ".join(values) + "}" if len(self._grid.get(name, ())) > 1 else " · ".join(values)

    def _reads_data(self) -> bool:
        default = {name: RunConfig.model_fields[name].default for name in ("rank", "seed")}
        return bool(self._row.needs(AdapterOptions(**default, targets=(), core={})))

    def _further(self) -> list[str]:
        named = dict.fromkeys((*self._given, *self.study.axes, *self._grid))
        return [name for name in named if name not in SHOWN_APART]

    def _selection(self) -> str:
        search, trials = self.study.search, math.prod(map(len, self._grid.values()))
        if not search or trials < 2:
            return "none"
        goes_on = search.beyond and len(self._grid.get("learning_rate", ())) > 1
        further = f" and up to {search.beyond} beyond" if goes_on else ""
        return f"{trials} trials{further} by {axis_name(search.select)}, seed {search.seed}"


def _method(axes: Axes, record: TunedRecord) -> str:
    """As the study calls it."""
    return str(axes.get("method", record.method))


def _trained(study: StudyResults, methods: list[str]) -> SheetCell:
    """How many values the runs of these methods train in all, as their records have it."""
    ended = [(run.axes, run.record) for run in study.runs if isinstance(run.record, TunedRecord)]
    counts = sorted({record.values_in_all for axes, record in ended if _method(axes, record) in methods})
    if not counts:
        return SheetCell("-", hint="nothing was trained", is_undefined=True)
    return SheetCell(f"{counts[0]:,}" + (f" to {counts[-1]:,}" if len(counts) > 1 else ""), value=counts[0])
