"""SST-2: is a phrase from a film review negative or positive?"""

from __future__ import annotations

from frozencore.tune.tasks.described import glue_task

TASK = glue_task(
    "sst2",
    "SST-2",
    prompt="Review: {sentence}\nSentiment:",
    choices=("negative", "positive"),
    sample={"sentence": "it 's a charming and often affecting journey . ", "label": 1, "idx": 0},
    num_rows={"train": 67349, "validation": 872},
    epochs=1,
    licence="not stated by the data's authors",
)
