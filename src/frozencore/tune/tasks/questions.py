"""Questions and sentences with options: the paper's family "reasoning/QA"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from frozencore.errors import DataError
from frozencore.tune.rows import Example, Row, position_of, text_field, texts_field
from frozencore.tune.tasks import HubDataset, Task


def arc_example(row: Row, row_id: str, question: str = "question") -> Example:
    """Make an example of a question with its options, ``choices: {text, label}``, and its ``answerKey``.

    Args:
        question: The question's column.
    """
    choices = row.get("choices")
    if not isinstance(choices, Mapping):
        raise DataError(f"Row {row_id}: column 'choices' must hold text and label, but holds {choices!r}.")
    options, labels = (texts_field(choices, part, row_id, within="choices") for part in ("text", "label"))
    if len(options) != len(labels):
        raise DataError(f"Row {row_id}: column 'choices' has {len(options)} texts but {len(labels)} labels.")
    answer = options[position_of(row, "answerKey", labels, row_id)]
    asked = f"Question: {text_field(row, question, row_id)}"
    return Example(
        id=row_id,
        prompt="\n".join((asked, "Options:", *(f"- {option}" for option in options), "Answer:")),
        completion=f" {answer}",
        choices=tuple(f" {option}" for option in options),
    )


ARC_CHALLENGE = Task(
    name="arc_challenge",
    label="ARC-C",
    family="reasoning/QA",
    scoring="choice",
    source=HubDataset(
        path="allenai/ai2_arc",
        config="ARC-Challenge",
        evaluation_split="test",
        validation_split="validation",
        columns=("question", "choices", "answerKey"),
        num_rows={"train": 1119, "validation": 299, "test": 1172},
    ),
    to_example=arc_example,
    num_train=1119,
    num_evaluation=500,
    epochs=3,
    licence="CC BY-SA 4.0 (card of allenai/ai2_arc)",
)
"""Science questions of a school exam with three to five options.

Some rows are labeled ``1`` to ``4``: the key is looked up among the row's own labels. Evaluation rows are the test
split. The prompt lists the options, and the answer that is scored after it is the text of an option: the paper's
accuracy of 83 is that of models that see the options; it does not print its prompts.
"""


OPENBOOKQA = Task(
    name="openbookqa",
    label="OBQA",
    family="reasoning/QA",
    scoring="choice",
    source=HubDataset(
        path="allenai/openbookqa",
        config="main",
        evaluation_split="test",
        validation_split="validation",
        columns=("question_stem", "choices", "answerKey"),
        num_rows={"train": 4957, "validation": 500, "test": 500},
    ),
    to_example=partial(arc_example, question="question_stem"),
    num_train=2000,
    num_evaluation=500,
    epochs=3,
    licence="not stated (card of allenai/openbookqa: unknown)",
)
"""Elementary science questions that need a fact from the book and common sense.

The book's fact is not shown. The prompt is ARC's. Evaluation rows are the test split.
"""


def hellaswag_example(row: Row, row_id: str) -> Example:
    endings = [without_tags(ending) for ending in texts_field(row, "endings", row_id)]
    if not all(endings):
        raise DataError(f"Row {row_id}: column 'endings' must hold text, but one holds nothing besides tags.")
    label = position_of(row, "label", [str(i) for i in range(len(endings))], row_id)
    activity, context = text_field(row, "activity_label", row_id), without_tags(text_field(row, "ctx", row_id))
    return Example(
        id=row_id,
        prompt=f"{activity}: {context}",
        completion=f" {endings[label]}",
        choices=tuple(f" {ending}" for ending in endings),
    )


def without_tags(text: str) -> str:
    """Remove tags in brackets; a title's tag ends a sentence."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r" {2,}", " ", re.sub(r"\[.*?\]", "", text)).strip()


HELLASWAG = Task(
    name="hellaswag",
    label="HellaSwag",
    family="reasoning/QA",
    scoring="choice",
    source=HubDataset(
        path="Rowan/hellaswag",
        evaluation_split="validation",
        columns=("activity_label", "ctx", "endings", "label"),
        num_rows={"train": 39905, "validation": 10042},
    ),
    to_example=hellaswag_example,
    num_train=2000,
    num_evaluation=500,
    epochs=2,
    licence="MIT (rowanz/hellaswag)",
)
"""Which sentence goes on with the caption of a video or with a piece of advice?

The hub's WikiHow rows carry tags (``[header]``, ``[title]``, ``[step]``), which are removed as lm-evaluation-harness
does; copies without tags give the same prompt. ``ctx`` alone is read, so ``ctx_b`` keeps its case (the harness
capitalises it). Evaluation rows are the validation split: the test labels are not public.
"""


def winogrande_example(row: Row, row_id: str) -> Example:
    sentence = text_field(row, "sentence", row_id)
    if "_" not in sentence:
        raise DataError(f"Row {row_id}: column 'sentence' must hold a blank, written _, but holds {sentence!r}.")
    options = [text_field(row, column, row_id) for column in ("option1", "option2")]
    answer = position_of(row, "answer", ["1", "2"], row_id)
    return Example(
        id=row_id,
        prompt=f"Sentence: {sentence}\nWhat does the blank _ stand for, {options[0]} or {options[1]}?\nAnswer:",
        completion=f" {options[answer]}",
        choices=tuple(f" {option}" for option in options),
    )


WINOGRANDE = Task(
    name="winogrande",
    label="WinoG",
    family="reasoning/QA",
    scoring="choice",
    source=HubDataset(
        path="allenai/winogrande",
        config="winogrande_xl",
        evaluation_split="validation",
        columns=("sentence", "option1", "option2", "answer"),
        num_rows={"train": 40398, "validation": 1267},
    ),
    to_example=winogrande_example,
    num_train=2000,
    num_evaluation=500,
    epochs=2,
    licence="CC BY (allenai/winogrande)",
)
"""Which of two names or things belongs in the blank?

The harness scores the words after the blank, given each filling ("partial evaluation"). The paper scores the choice
after one prompt, and so do we: the whole sentence comes first, with its blank, and each option answers what the blank
stands for. Evaluation rows are the validation split: the test answers are not public.
"""
