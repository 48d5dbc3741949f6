"""RTE: does one text follow from another?

{"sentence1": "No Weapons of Mass Destruction Found in Iraq Yet.",
 "sentence2": "Weapons of Mass Destruction Found in Iraq.", "label": 1, "idx": 0}

Label 0 is entailment, 1 is not. GLUE's validation split has 277 rows: all are evaluated.
"""

from __future__ import annotations

from frozencore.tune.tasks.glue import glue_task
from frozencore.tune.tasks.made_up import sentence

TASK = glue_task(
    "rte",
    prompt="Text: {sentence1}\nClaim: {sentence2}\nDoes the claim follow from the text?\nAnswer:",
    choices=(" yes", " no"),
    texts={"sentence1": sentence, "sentence2": sentence},
    num_rows={"train": 2490, "validation": 277},
    epochs=3,
    licence="not stated by the data's authors",
)
