r"""MRPC: do two sentences of the news mean the same?

{"sentence1": "He said the foodservice pie business doesn 't fit the company 's long-term growth strategy .",
 "sentence2": "\" The foodservice pie business does not fit our long-term growth strategy .", "label": 1, "idx": 1}

Label 1 is equivalent. Evaluation rows are GLUE's validation split, 408 rows: all are evaluated.
"""

from __future__ import annotations

from frozencore.tune.tasks.glue import glue_task
from frozencore.tune.tasks.made_up import sentence

TASK = glue_task(
    "mrpc",
    prompt="Sentence 1: {sentence1}\nSentence 2: {sentence2}\nDo both sentences mean the same?\nAnswer:",
    choices=(" no", " yes"),
    texts={"sentence1": sentence, "sentence2": sentence},
    num_rows={"train": 3668, "validation": 408},
    epochs=3,
    licence="not stated (Microsoft Research Paraphrase Corpus)",
)
