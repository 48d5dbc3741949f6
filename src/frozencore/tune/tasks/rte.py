"""RTE: does one text follow from another?

Label 0 is entailment, 1 is not. GLUE's validation split has 277 rows: all are evaluated.
"""

from __future__ import annotations

from frozencore.tune.tasks.described import glue_task

TASK = glue_task(
    "rte",
    "RTE",
    prompt="Text: {sentence1}\nClaim: {sentence2}\nDoes the claim follow from the text?\nAnswer:",
    choices=("yes", "no"),
    sample={
        "sentence1": "No Weapons of Mass Destruction Found in Iraq Yet.",
        "sentence2": "Weapons of Mass Destruction Found in Iraq.",
        "label": 1,
        "idx": 0,
    },
    num_rows={"train": 2490, "validation": 277},
    epochs=3,
    licence="not stated by the data's authors",
)
