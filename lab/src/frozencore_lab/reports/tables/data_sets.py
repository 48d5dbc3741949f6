"""The campaign's tasks: where their rows come from, how many, how they are scored (paper, table "datasets")."""

from __future__ import annotations

from typing import Any

from frozencore.tune.suite import find_task
from frozencore.tune.tasks import Scoring, Split
from frozencore.tune.tasks.splits import VALIDATION_SHARE
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.reports.labels import value_name
from frozencore_lab.reports.sheets.sheet import Sheet, label, number

SCORED: dict[Scoring, str] = {
    "exact_match": "greedy exact match",
    "choice": "likelihood of choices",
    "text": "held-out loss",
}


SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")
HEADINGS = (
    "task", "data set", "configuration", f"splits: {' / '.join(SPLITS)}", "scoring", "licence", "train", "evaluation",
    "epochs",
)  # fmt: skip


def data_sheet(campaign: Campaign) -> Sheet:
    """A line for each task of any study, with the sizes that every run is given."""
    axes = [study.axes for study in campaign.studies.values()]
    learned = [task for values in axes for task in values["task"]]
    calibrated_on = [task for values in axes for task in values.get("calibration_task", ()) if task is not None]
    given: dict[str, Any] = dict(campaign.base)
    rows = []
    for name in dict.fromkeys(map(str, (*learned, *calibrated_on))):
        task = find_task(name)
        origin = task.source.origin
        sizes = (
            given.get("num_train") or task.num_train,
            given.get("num_evaluation") or task.num_evaluation,
            given.get("epochs") or task.epochs,
        )
        splits = " / ".join(origin.splits.get(split, "-") for split in SPLITS)
        texts = value_name("task", name), origin.name, origin.configuration, splits, SCORED[task.scoring], task.licence
        rows.append((*map(label, texts), *(number(size, 0) for size in sizes)))
    return Sheet(
        "data-sets",
        "Data sets, fixed subsets and training length",
        "Rows to train on and to evaluate on, at most: drawn by a hash of the row's id, the same for all methods and "
        "seeds. A search is scored on rows that are not trained on: unused ones of the training split, else the "
        f"validation split, else {VALIDATION_SHARE:.0%} of the training rows.",
        HEADINGS,
        tuple(rows),
        num_labels=6,
    )
