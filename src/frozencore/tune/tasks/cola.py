"""CoLA: is a sentence acceptable English?

{"sentence": "The more we study verbs, the crazier they get.", "label": 1, "idx": 3}

Label 1 is acceptable. The paper reports accuracy of the choice, not the Matthews correlation of GLUE.
"""

from __future__ import annotations

from frozencore.tune.tasks.glue import glue_task
from frozencore.tune.tasks.made_up import sentence

TASK = glue_task(
    "cola",
    prompt="Sentence: {sentence}\nIs this sentence acceptable English?\nAnswer:",
    choices=(" no", " yes"),
    texts={"sentence": sentence},
    num_rows={"train": 8551, "validation": 1043},
    epochs=2,
    licence="excerpts of published works, for research (nyu-mll/CoLA-baselines)",
)
