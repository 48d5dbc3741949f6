"""QNLI: does a sentence of Wikipedia hold the answer to a question?

{"question": "What happens if a plant looses roots or its shoots?", "sentence": "In fact it is possible to
  grow an entire plant from a single leaf, as is the case with Saintpaulia [...]", "label": 1, "idx": 3}

Label 0 is entailment: the answer is there. Evaluation rows are GLUE's validation split; its test labels are not public.
"""

from __future__ import annotations

from frozencore.tune.tasks.glue import glue_task
from frozencore.tune.tasks.made_up import question, sentence

TASK = glue_task(
    "qnli",
    prompt="Question: {question}\nSentence: {sentence}\nDoes the sentence answer the question?\nAnswer:",
    choices=(" yes", " no"),
    texts={"question": question, "sentence": sentence},
    num_rows={"train": 104743, "validation": 5463},
    epochs=1,
    licence="CC BY-SA 4.0 (SQuAD, from which it was made)",
)
