"""The paper's eleven tasks: GLUE, math, and reasoning/QA.

The labels of the test splits of GLUE, HellaSwag and WinoGrande are not public, so their validation splits serve as
evaluation rows. ARC and OpenBookQA are evaluated on their test splits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from frozencore.errors import DataError
from frozencore.tune.rows.row import RawRow, Row, text_field, texts_field
from frozencore.tune.scoring.answers import parse_answer, parse_number
from frozencore_lab.tasks.described import Described, position_of
from frozencore_lab.tasks.task import HubDataset, Split, Task

ON_TEST: Mapping[Split, str] = {"train": "train", "evaluation": "test"}
ON_VALIDATION: Mapping[Split, str] = {"train": "train", "evaluation": "validation"}
ALL_THREE: Mapping[Split, str] = {"train": "train", "validation": "validation", "evaluation": "test"}


def glue_task(name: str, label: str, *, prompt: str, choices: tuple[str, ...], epochs: int, licence: str) -> Task:
    """Make one of GLUE's tasks of one sentence or two; ``choices`` are the answers by label."""
    columns = (*re.findall(r"\{(\w+)\}", prompt), "label")
    source = HubDataset("nyu-mll/glue", columns, ON_VALIDATION, name)
    to_row = Described(prompt, "label", choices)
    return Task(name, "choice", source, to_row, 2000, 500, epochs, licence, label=label, family="GLUE")


SST2 = glue_task(
    "sst2", "SST-2", prompt="Review: {sentence}\nSentiment:", choices=("negative", "positive"), epochs=1,
    licence="not stated by the data's authors",
)  # fmt: skip
"""Is a phrase from a film review negative or positive?"""

COLA = glue_task(
    "cola", "CoLA", prompt="Sentence: {sentence}\nIs this sentence acceptable English?\nAnswer:", choices=("no", "yes"),
    epochs=2, licence="excerpts of published works, for research (nyu-mll/CoLA-baselines)",
)  # fmt: skip
"""Is a sentence acceptable English? The paper reports accuracy of the choice, not the Matthews correlation of GLUE."""

MRPC = glue_task(
    "mrpc", "MRPC",
    prompt="Sentence 1: {sentence1}\nSentence 2: {sentence2}\nDo both sentences mean the same?\nAnswer:",
    choices=("no", "yes"), epochs=3, licence="not stated (Microsoft Research Paraphrase Corpus)",
)  # fmt: skip
"""Do two sentences of the news mean the same? All 408 rows of the validation split are evaluated."""

QNLI = glue_task(
    "qnli", "QNLI",
    prompt="Question: {question}\nSentence: {sentence}\nDoes the sentence answer the question?\nAnswer:",
    choices=("yes", "no"), epochs=1, licence="CC BY-SA 4.0 (SQuAD, from which it was made)",
)  # fmt: skip
"""Does a sentence of Wikipedia hold the answer to a question? Label 0 is entailment: the answer is there."""

RTE = glue_task(
    "rte", "RTE", prompt="Text: {sentence1}\nClaim: {sentence2}\nDoes the claim follow from the text?\nAnswer:",
    choices=("yes", "no"), epochs=3, licence="not stated by the data's authors",
)  # fmt: skip
"""Does one text follow from another? Label 0 is entailment. All 277 rows of the validation split are evaluated."""


def svamp_row(row: RawRow, row_id: str) -> Row:
    body, question, answer = (text_field(row, column, row_id) for column in ("Body", "Question", "Answer"))
    if parse_number(answer) is None:
        raise DataError(f"Row {row_id}: column 'Answer' must hold a number, but holds {answer!r}.")
    stop = "" if body[-1] in ".,?!;:" else "."  # four in ten bodies have no stop
    return Row(
        id=row_id,
        prompt=f'Question: {body}{stop} {question}\nEnd with "The answer is:" and the number.\nAnswer:',
        completion=f" The answer is: {answer}",
    )


SVAMP = Task(
    "svamp", "exact_match", HubDataset("ChilleD/SVAMP", ("Body", "Question", "Answer"), ON_TEST), svamp_row,
    num_train=700, num_evaluation=300, epochs=3, max_new_tokens=32, label="SVAMP", family="math",
    licence="MIT (arkilpatel/SVAMP)",
)  # fmt: skip
"""One-step word problems with a number for an answer."""


def gsm8k_row(row: RawRow, row_id: str) -> Row:
    """The prompt, and the solution with its own marker; no calculator answers the notes in ``<<`` and ``>>`` here."""
    question = text_field(row, "question", row_id)
    solution = re.sub(r"<<[^<>]*>>", "", text_field(row, "answer", row_id))
    if parse_answer(solution, gold=True) is None:
        raise DataError(f"Row {row_id}: column 'answer' must end with '#### NUMBER', but ends with {solution[-40:]!r}.")
    return Row(
        id=row_id,
        prompt=f'Question: {question}\nSolve it step by step and end with "####" and the number.\nAnswer:',
        completion=f" {solution}",
    )


GSM8K = Task(
    "gsm8k", "exact_match", HubDataset("openai/gsm8k", ("question", "answer"), ON_TEST, "main"), gsm8k_row,
    num_train=1500, num_evaluation=300, epochs=2, max_new_tokens=256, label="GSM8K", family="math",
    licence="MIT (openai/grade-school-math)",
)  # fmt: skip
"""Word problems of several steps, answered with a worked solution and a number."""


def arc_row(row: RawRow, row_id: str, question: str = "question") -> Row:
    """Make a row of the column ``question``, its options (``choices: {text, label}``) and its ``answerKey``."""
    choices = row.get("choices")
    if not isinstance(choices, Mapping):
        raise DataError(f"Row {row_id}: column 'choices' must hold text and label, but holds {choices!r}.")
    options, labels = (
        [text.strip() for text in texts_field(choices, part, row_id, within="choices")] for part in ("text", "label")
    )
    if len(options) != len(labels):
        raise DataError(f"Row {row_id}: column 'choices' has {len(options)} texts but {len(labels)} labels.")
    answer = options[position_of(row, "answerKey", labels, row_id)]  # some rows are labeled 1 to 4
    asked = f"Question: {text_field(row, question, row_id)}"
    return Row(
        id=row_id,
        prompt="\n".join((asked, "Options:", *(f"- {option}" for option in options), "Answer:")),
        completion=f" {answer}",
        choices=tuple(f" {option}" for option in options),
    )


ARC_CHALLENGE = Task(
    "arc_challenge", "choice",
    HubDataset("allenai/ai2_arc", ("question", "choices", "answerKey"), ALL_THREE, "ARC-Challenge"), arc_row,
    num_train=1119, num_evaluation=500, epochs=3, label="ARC-C", family="reasoning/QA",
    licence="CC BY-SA 4.0 (card of allenai/ai2_arc)",
)  # fmt: skip
"""Science questions of a school exam with three to five options.

The prompt lists the options, and the answer that is scored after it is the text of an option: the paper's accuracy of
83 is that of models that see the options; it does not print its prompts.
"""

OPENBOOKQA = Task(
    "openbookqa", "choice",
    HubDataset("allenai/openbookqa", ("question_stem", "choices", "answerKey"), ALL_THREE, "main"),
    partial(arc_row, question="question_stem"),
    num_train=2000, num_evaluation=500, epochs=3, label="OBQA", family="reasoning/QA",
    licence="not stated (card of allenai/openbookqa: unknown)",
)  # fmt: skip
"""Elementary science questions that need common sense and a fact from a book, which is not shown."""


def hellaswag_row(row: RawRow, row_id: str) -> Row:
    """Make a row of ``ctx``, whose second half keeps its case (lm-evaluation-harness capitalises it)."""
    endings = [without_tags(ending) for ending in texts_field(row, "endings", row_id)]
    if not all(endings):
        raise DataError(f"Row {row_id}: column 'endings' must hold text, but one holds nothing besides tags.")
    label = position_of(row, "label", [str(i) for i in range(len(endings))], row_id)
    activity, context = text_field(row, "activity_label", row_id), without_tags(text_field(row, "ctx", row_id))
    return Row(
        id=row_id,
        prompt=f"{activity}: {context}",
        completion=f" {endings[label]}",
        choices=tuple(f" {ending}" for ending in endings),
    )


def without_tags(text: str) -> str:
    """Remove the tags of WikiHow's rows, such as ``[step]``, as the harness does; a title's tag ends a sentence."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r" {2,}", " ", re.sub(r"\[.*?\]", "", text)).strip()


HELLASWAG = Task(
    "hellaswag", "choice", HubDataset("Rowan/hellaswag", ("activity_label", "ctx", "endings", "label"), ON_VALIDATION),
    hellaswag_row,
    num_train=2000, num_evaluation=500, epochs=2, label="HellaSwag", family="reasoning/QA",
    licence="MIT (rowanz/hellaswag)",
)  # fmt: skip
"""Which sentence goes on with the caption of a video or with a piece of advice?"""


def winogrande_row(row: RawRow, row_id: str) -> Row:
    """Make a row of a sentence with its blank, and ask what the blank stands for.

    The harness scores the words after the blank, given each filling ("partial evaluation"). The paper scores the choice
    after one prompt, and so do we.
    """
    sentence = text_field(row, "sentence", row_id)
    if "_" not in sentence:
        raise DataError(f"Row {row_id}: column 'sentence' must hold a blank, written _, but holds {sentence!r}.")
    options = [text_field(row, column, row_id) for column in ("option1", "option2")]
    answer = position_of(row, "answer", ["1", "2"], row_id)
    return Row(
        id=row_id,
        prompt=f"Sentence: {sentence}\nWhat does the blank _ stand for, {options[0]} or {options[1]}?\nAnswer:",
        completion=f" {options[answer]}",
        choices=tuple(f" {option}" for option in options),
    )


WINOGRANDE = Task(
    "winogrande", "choice",
    HubDataset("allenai/winogrande", ("sentence", "option1", "option2", "answer"), ON_VALIDATION, "winogrande_xl"),
    winogrande_row,
    num_train=2000, num_evaluation=500, epochs=2, label="WinoG", family="reasoning/QA",
    licence="CC BY (allenai/winogrande)",
)  # fmt: skip
"""Which of two names or things belongs in the blank?"""

PAPER_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        SVAMP, GSM8K, SST2, QNLI, COLA, RTE, MRPC, ARC_CHALLENGE, OPENBOOKQA, HELLASWAG, WINOGRANDE,
    )
}  # fmt: skip
