"""MRPC: do two sentences of the news mean the same?

Label 1 is equivalent. Evaluation rows are GLUE's validation split, 408 rows: all are evaluated.
"""

from __future__ import annotations

from frozencore.tune.tasks.described import glue_task

TASK = glue_task(
    "mrpc",
    "MRPC",
    prompt="Sentence 1: {sentence1}\nSentence 2: {sentence2}\nDo both sentences mean the same?\nAnswer:",
    choices=("no", "yes"),
    sample={
        "sentence1": "He said the foodservice pie business doesn 't fit the company 's long-term growth strategy .",
        "sentence2": '" The foodservice pie business does not fit our long-term growth strategy .',
        "label": 1,
        "idx": 1,
    },
    num_rows={"train": 3668, "validation": 408},
    epochs=3,
    licence="not stated (Microsoft Research Paraphrase Corpus)",
)
