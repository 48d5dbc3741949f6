"""CoLA: is a sentence acceptable English?

Label 1 is acceptable. The paper reports accuracy of the choice, not the Matthews correlation of GLUE.
"""

from __future__ import annotations

from frozencore.tune.tasks.described import glue_task

TASK = glue_task(
    "cola",
    "CoLA",
    prompt="Sentence: {sentence}\nIs this sentence acceptable English?\nAnswer:",
    choices=("no", "yes"),
    sample={"sentence": "The more we study verbs, the crazier they get.", "label": 1, "idx": 3},
    num_rows={"train": 8551, "validation": 1043},
    epochs=2,
    licence="excerpts of published works, for research (nyu-mll/CoLA-baselines)",
)
