"""Rows of the paper's tasks as examples, and what a bad row or a missing data set says."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore.errors import DataError
from frozencore.tune.suite import PAPER_TASKS, TASKS, TEXT_TASKS
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.answers import parse_answer, parse_number
from frozencore.tune.tasks.glue import SST2
from frozencore.tune.tasks.math_problems import GSM8K, SVAMP
from frozencore.tune.tasks.questions import ARC_CHALLENGE, HELLASWAG, WINOGRANDE

SVAMP_ROW = {"Body": "Tom has 3 pens", "Question": "How many pens has he?", "Answer": "3"}


def test_a_row_is_a_question_with_a_marked_number_or_a_choice() -> None:
    example = SST2.to_example({"sentence": "a charming journey . ", "label": 1}, "train-0")
    assert example.prompt + example.completion == "Review: a charming journey .\nSentiment: positive"
    assert example.choices == (" negative", " positive")
    example = SVAMP.to_example(SVAMP_ROW, "train-0")
    assert example.prompt.startswith("Question: Tom has 3 pens. How many pens has he?\n")
    assert example.completion == " The answer is: 3"
    assert example.choices == ()


ARC_ROW = {
    "question": "Why?",
    "choices": {"text": ["dew", "fog", "ice"], "label": ["1", "2", "3"]},
    "answerKey": "3",
}


def test_a_gsm8k_row_loses_its_calculator_notes_and_keeps_its_marker() -> None:
    answer = "She had 12/60 = $<<12/60=0.2>>0.2 per minute.\n#### 1,010"
    example = GSM8K.to_example({"question": "How much?", "answer": answer}, "train-0")
    assert example.completion == " She had 12/60 = $0.2 per minute.\n#### 1,010"
    assert parse_answer(example.completion) == 1010


def test_an_arc_row_has_any_number_of_options_and_any_labels() -> None:
    example = ARC_CHALLENGE.to_example(ARC_ROW, "train-0")
    assert example.choices == (" dew", " fog", " ice")
    assert example.completion == " ice"
    assert example.prompt == "Question: Why?\nOptions:\n- dew\n- fog\n- ice\nAnswer:"
    five = {"text": list("vwxyz"), "label": list("ABCDE")}
    assert ARC_CHALLENGE.to_example(ARC_ROW | {"choices": five, "answerKey": "E"}, "train-0").completion == " z"


@pytest.mark.parametrize(
    ("task", "row", "column"),
    [
        (SVAMP, SVAMP_ROW | {"Answer": "three"}, "Answer"),
        (SVAMP, SVAMP_ROW | {"Body": " "}, "Body"),
        (SVAMP, {"Body": "a", "Answer": "1"}, "Question"),
        (SST2, {"sentence": "a", "label": -1}, "label"),
        (SST2, {"sentence": "a", "label": 2}, "label"),
        (SST2, {"sentence": "a", "label": None}, "label"),
        (SST2, {"sentence": None, "label": 1}, "sentence"),
        (GSM8K, {"question": "a", "answer": "no marker 5"}, "answer"),
        (ARC_CHALLENGE, ARC_ROW | {"answerKey": "A"}, "answerKey"),
        (ARC_CHALLENGE, ARC_ROW | {"choices": None}, "choices"),
        (ARC_CHALLENGE, ARC_ROW | {"choices": {"text": ["a", " "], "label": ["1", "2"]}}, "choices.text"),
        (ARC_CHALLENGE, ARC_ROW | {"choices": {"text": ["a", "b"], "label": ["1", "2", "3"]}}, "choices"),
        (HELLASWAG, {"activity_label": "a", "ctx": "b", "endings": ["[x]", "c"], "label": "0"}, "endings"),
        (HELLASWAG, {"activity_label": "a", "ctx": "b", "endings": ["c", "d"], "label": ""}, "label"),
        (WINOGRANDE, {"sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"}, "sentence"),
    ],
)
def test_a_bad_row_is_named_with_its_column(task: Task, row: dict[str, object], column: str) -> None:
    with pytest.raises(DataError, match=rf"Row train-7: column '{column}'") as error:
        task.to_example(row, "train-7")
    assert "\n" not in str(error.value)


def test_a_text_task_is_one_text_of_its_rows_without_question_or_choice() -> None:
    rows = {
        "gsm8k-text": ({"question": "How much?", "answer": "#### 1"}, "How much?"),
        "sst2-text": ({"sentence": "a charming journey .", "label": 1}, "a charming journey ."),
        "hellaswag-text": (
            {"activity_label": "Health", "ctx": "Turn off the light.", "endings": ["Get up.", "Sleep."], "label": "1"},
            "Health: Turn off the light. Sleep.",
        ),
    }
    assert set(TEXT_TASKS) == set(rows)
    for name, (row, text) in rows.items():
        task = TEXT_TASKS[name]
        assert task.scoring == "text"
        assert task.source == PAPER_TASKS[name.removesuffix("-text")].source
        example = task.to_example(row, "train-0")
        assert (example.id, example.prompt, example.completion) == ("train-0", "", text)


def test_hellaswag_reads_alike_with_the_hubs_tags_and_without() -> None:
    tagged = {
        "activity_label": "Health",
        "ctx": "[header] How to sleep [title] Go to bed. [step] Turn off  the light.",
        "endings": ["[substeps] Lie down.", "Get up.", "Run.", "Eat."],
        "label": "0",
    }
    clean = tagged | {
        "ctx": "How to sleep. Go to bed. Turn off the light.",
        "endings": ["Lie down.", "Get up.", "Run.", "Eat."],
    }
    example = HELLASWAG.to_example(tagged, "row")
    assert example == HELLASWAG.to_example(clean, "row")
    assert example.prompt == "Health: How to sleep. Go to bed. Turn off the light."
    assert example.completion == " Lie down."


def test_the_suite_is_the_papers_table() -> None:
    """Appendix, table "Complete dataset protocol": task, train, evaluation, epochs."""
    sizes = {task.name: (task.num_train, task.num_evaluation, task.epochs) for task in PAPER_TASKS.values()}
    assert sizes == {
        "svamp": (700, 300, 3), "gsm8k": (1500, 300, 2), "sst2": (2000, 500, 1), "qnli": (2000, 500, 1),
        "cola": (2000, 500, 2), "rte": (2000, 500, 3), "mrpc": (2000, 500, 3), "arc_challenge": (1119, 500, 3),
        "openbookqa": (2000, 500, 3), "hellaswag": (2000, 500, 2), "winogrande": (2000, 500, 2),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["svamp", "gsm8k", "sst2", "qnli", "cola", "arc_challenge", "hellaswag"])
def test_every_real_row_is_an_example(name: str, shared_data: Path) -> None:
    task = TASKS[name]
    for split, least in (("train", task.num_train), ("evaluation", task.num_evaluation)):
        rows = task.source.rows(split, shared_data)
        examples = [task.to_example(row, f"{split}-{i}") for i, row in enumerate(rows)]
        assert len(examples) >= least
        assert all(not example.choices or example.completion in example.choices for example in examples)
        if task is ARC_CHALLENGE:
            assert {len(example.choices) for example in examples} >= {3, 4}
            for row, example in zip(rows, examples, strict=True):
                texts, labels = row["choices"]["text"], row["choices"]["label"]
                assert example.completion == f" {texts[labels.index(row['answerKey'])].strip()}"
        if task is SVAMP:
            assert all(
                parse_answer(e.completion) == parse_number(r["Answer"]) for e, r in zip(examples, rows, strict=True)
            )
    assert len(task.source.rows("validation", shared_data)) == (299 if name == "arc_challenge" else 0)
