"""SST-2: is a phrase from a film review negative or positive?

{"sentence": "it 's a charming and often affecting journey . ", "label": 1, "idx": 0}
"""

from __future__ import annotations

from frozencore.tune.tasks.glue import glue_task
from frozencore.tune.tasks.made_up import sentence

TASK = glue_task(
    "sst2",
    prompt="Review: {sentence}\nSentiment:",
    choices=(" negative", " positive"),
    texts={"sentence": lambda rng: f"{sentence(rng)} "},
    num_rows={"train": 67349, "validation": 872},
    epochs=1,
    licence="not stated by the data's authors",
)
