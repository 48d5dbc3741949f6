"""HellaSwag: which sentence goes on with the caption of a video or with a piece of advice?

The hub's WikiHow rows carry tags (``[header]``, ``[title]``, ``[step]``), which are removed as lm-evaluation-harness
does; copies without tags give the same prompt. ``ctx`` alone is read, so ``ctx_b`` keeps its case (the harness
capitalises it). Evaluation rows are the validation split: the test labels are not public.
"""

from __future__ import annotations

import re

from frozencore.errors import DataError
from frozencore.tune.rows import Example, Row, position_of, text_field, texts_field
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.hub_rows import HubDataset


def to_example(row: Row, row_id: str) -> Example:
    endings = [without_tags(ending) for ending in texts_field(row, "endings", row_id)]
    if not all(endings):
        raise DataError(f"Row {row_id}: column 'endings' must hold text, but one holds nothing besides tags.")
    label = position_of(row, "label", [str(i) for i in range(len(endings))], row_id)
    activity, context = text_field(row, "activity_label", row_id), without_tags(text_field(row, "ctx", row_id))
    return Example(
        id=row_id,
        prompt=f"{activity}: {context}",
        completion=f" {endings[label]}",
        choices=tuple(f" {ending}" for ending in endings),
    )


def without_tags(text: str) -> str:
    """The text without tags in brackets; a title's tag ends a sentence."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r" {2,}", " ", re.sub(r"\[.*?\]", "", text)).strip()


TASK = Task(
    name="hellaswag",
    label="HellaSwag",
    family="reasoning/QA",
    scoring="choice",
    source=HubDataset(
        path="Rowan/hellaswag",
        evaluation_split="validation",
        columns=("activity_label", "ctx", "endings", "label"),
        num_rows={"train": 39905, "validation": 10042},
        sample={
            "ind": 12,
            "activity_label": "Baking cookies",
            "ctx_a": "A large tray of cake is flipped over and placed on counter.",
            "ctx_b": "a large tray of meat",
            "ctx": "A large tray of cake is flipped over and placed on counter. a large tray of meat",
            "endings": ["is placed onto a potato.", ", ls, and pickles are placed.", "is poured.", "is prepared."],
            "source_id": "activitynet~v_-2dxp-mv2zo",
            "split": "train",
            "split_type": "indomain",
            "label": "3",
        },
        labels={"label": "0123"},
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=2,
    licence="MIT (rowanz/hellaswag)",
)
