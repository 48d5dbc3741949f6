"""QNLI: does a sentence of Wikipedia hold the answer to a question?

Label 0 is entailment: the answer is there. Evaluation rows are GLUE's validation split; its test labels are not public.
"""

from __future__ import annotations

from frozencore.tune.tasks.described import glue_task

TASK = glue_task(
    "qnli",
    "QNLI",
    prompt="Question: {question}\nSentence: {sentence}\nDoes the sentence answer the question?\nAnswer:",
    choices=("yes", "no"),
    sample={
        "question": "What happens if a plant looses roots or its shoots?",
        "sentence": "In fact it is possible to grow an entire plant from a single leaf [...]",
        "label": 1,
        "idx": 3,
    },
    num_rows={"train": 104743, "validation": 5463},
    epochs=1,
    licence="CC BY-SA 4.0 (SQuAD, from which it was made)",
)
