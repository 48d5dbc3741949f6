"""GLUE's tasks of one sentence or two.

The labels of GLUE's test splits are not public, so the validation splits serve as evaluation rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from frozencore.tune.tasks import HubDataset, Task
from frozencore.tune.tasks.described_task import Described


def glue_task(
    name: str,
    label: str,
    *,
    prompt: str,
    choices: tuple[str, ...],
    num_rows: Mapping[str, int],
    epochs: int,
    licence: str,
) -> Task:
    """Make one of GLUE's tasks.

    Args:
        choices: The answers, by label.
    """
    source = HubDataset(
        path="nyu-mll/glue",
        config=name,
        evaluation_split="validation",
        columns=(*re.findall(r"\{(\w+)\}", prompt), "label"),
        num_rows=num_rows,
    )
    to_example = Described(prompt, "label", choices)
    return Task(name, "choice", source, to_example, 2000, 500, epochs, licence, label=label, family="GLUE")


SST2 = glue_task(
    "sst2",
    "SST-2",
    prompt="Review: {sentence}\nSentiment:",
    choices=("negative", "positive"),
    num_rows={"train": 67349, "validation": 872},
    epochs=1,
    licence="not stated by the data's authors",
)
"""Is a phrase from a film review negative or positive?"""

COLA = glue_task(
    "cola",
    "CoLA",
    prompt="Sentence: {sentence}\nIs this sentence acceptable English?\nAnswer:",
    choices=("no", "yes"),
    num_rows={"train": 8551, "validation": 1043},
    epochs=2,
    licence="excerpts of published works, for research (nyu-mll/CoLA-baselines)",
)
"""Is a sentence acceptable English?

Label 1 is acceptable. The paper reports accuracy of the choice, not the Matthews correlation of GLUE.
"""

MRPC = glue_task(
    "mrpc",
    "MRPC",
    prompt="Sentence 1: {sentence1}\nSentence 2: {sentence2}\nDo both sentences mean the same?\nAnswer:",
    choices=("no", "yes"),
    num_rows={"train": 3668, "validation": 408},
    epochs=3,
    licence="not stated (Microsoft Research Paraphrase Corpus)",
)
"""Do two sentences of the news mean the same?

Label 1 is equivalent. Evaluation rows are GLUE's validation split, 408 rows: all are evaluated.
"""

QNLI = glue_task(
    "qnli",
    "QNLI",
    prompt="Question: {question}\nSentence: {sentence}\nDoes the sentence answer the question?\nAnswer:",
    choices=("yes", "no"),
    num_rows={"train": 104743, "validation": 5463},
    epochs=1,
    licence="CC BY-SA 4.0 (SQuAD, from which it was made)",
)
"""Does a sentence of Wikipedia hold the answer to a question?

Label 0 is entailment: the answer is there. Evaluation rows are GLUE's validation split; its test labels are not public.
"""

RTE = glue_task(
    "rte",
    "RTE",
    prompt="Text: {sentence1}\nClaim: {sentence2}\nDoes the claim follow from the text?\nAnswer:",
    choices=("yes", "no"),
    num_rows={"train": 2490, "validation": 277},
    epochs=3,
    licence="not stated by the data's authors",
)
"""Does one text follow from another?

Label 0 is entailment, 1 is not. GLUE's validation split has 277 rows: all are evaluated.
"""
