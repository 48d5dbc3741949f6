"""The user's own rows as a task."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import ConfigError, DataError
from frozencore.tune.scoring.answers import parse_answer
from frozencore_lab.tasks.registry import find_task

CAPITALS = """\
name: capitals
scoring: choice
train: train.jsonl
evaluation: test.jsonl
prompt: "Question: capital of {country}?\\nAnswer:"
choices: options
answer: answer
epochs: 3
"""
SUMS = 'name: sums\nscoring: exact_match\nevaluation: test.jsonl\nprompt: "{a} + {b} ="\nanswer: sum\n'


def task_file(folder: Path, text: str, rows: list[dict[str, Any]], train: list[dict[str, Any]] | None = None) -> str:
    for name, own in (("test.jsonl", rows), ("train.jsonl", train or rows)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in own))
    (folder / "task.yaml").write_text(text)
    return str(folder / "task.yaml")


def country(name: str, answer: Any = "Paris") -> dict[str, Any]:
    return {"country": name, "options": ["Paris", "Rome"], "answer": answer}


def test_ten_lines_make_a_choice_task(tmp_path: Path) -> None:
    train = [country(f"T{i}") for i in range(20)]
    task = find_task(task_file(tmp_path, CAPITALS, [country("France"), country("Italy", 1)], train))
    splits = task.draw()
    assert (task.name, task.epochs, len(splits.train), len(splits.validation)) == ("capitals", 3, 18, 2)
    by_prompt = {example.prompt: example for example in splits.evaluation}
    italy = by_prompt["Question: capital of Italy?\nAnswer:"]
    assert (italy.completion, italy.choices) == (" Rome", (" Paris", " Rome"))
    assert by_prompt["Question: capital of France?\nAnswer:"].completion == " Paris"


def test_choices_may_stand_in_the_file_and_numbers_need_none(tmp_path: Path) -> None:
    path = task_file(tmp_path, CAPITALS.replace("options", '["yes", "no"]'), [country("France", "no")])
    (example,) = find_task(path).draw_evaluation()
    assert (example.completion, example.choices) == (" no", (" yes", " no"))
    (example,) = find_task(task_file(tmp_path, SUMS, [{"a": 1, "b": 2, "sum": 3}])).draw_evaluation()
    assert (example.prompt, example.completion) == ("1 + 2 =", " The answer is: 3")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- 1\n", "must hold a task: name, scoring"),
        (CAPITALS + "epoch: 3\n", "epoch: extra inputs are not permitted"),
        (CAPITALS + "epochs: 3\n", "the key 'epochs' is given twice"),
        (CAPITALS.replace("epochs: 3", "epochs: 1e1"), "epochs: input should be a valid integer"),
        (CAPITALS.replace("epochs: 3", "epochs: '3'"), "epochs: input should be a valid integer, but '3' was given"),
        (CAPITALS.replace("scoring: choice", "scoring: chance"), "scoring: input should be 'choice' or 'exact_match'"),
        (CAPITALS.replace("scoring: choice", "scoring: exact_match"), "choices belong to 'scoring: choice'"),
        (CAPITALS.replace("choices: options\n", ""), "choices belong to 'scoring: choice'"),
        (CAPITALS.replace("options", "[yes-only]"), "give two texts or more"),
        (CAPITALS.replace("answer: answer\n", ""), "answer: field required"),
        *(
            (CAPITALS.replace("{country}", jinja), "columns are named as {name}, and Jinja is not read")
            for jinja in ("{{country}}", "{% if a %}{country}", "{# note #}{country}")
        ),
        (CAPITALS.replace("{country}", "it"), "prompt: name the columns that it shows in braces"),
        (CAPITALS.replace("name: capitals", "name: a/b"), "name: string should match"),
        (CAPITALS.replace("name: capitals", "name: .."), "name: string should match"),
        (CAPITALS.replace("name: capitals", f"name: {'x' * 300}"), "name: string should match"),
        (CAPITALS.replace("name: capitals", 'name: "a\\nb"'), "name: string should match"),
    ],
)
def test_a_bad_description_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        find_task(task_file(tmp_path, text, [country("France")]))
    assert "\n" not in str(error.value)
    assert "task.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (country("France", "Oslo"), "Row evaluation-0: .*'answer' .*'Oslo'"),
        (country("France", 2), "must hold one of Paris, Rome, or a position from 0 to 1, but holds 2"),
        (country("France", math.nan), "but holds nan"),
        ({"country": "x", "options": ["nan", "b"], "answer": math.nan}, "but holds nan"),
        ({"country": "x", "options": ["None", "b"], "answer": None}, "but holds None"),
        (country(math.nan), "column 'country' must hold text or a number, but holds nan"),
        ({"country": "x", "options": ["a", "a"], "answer": "a"}, "holds 'a', which may be the choice 'a' or 'a'"),
        (country("France", None), "but holds None"),
        (country(" "), "column 'country' must hold text or a number, but holds ' '"),
        ({"options": ["a", "b"], "answer": "a"}, "column 'country' .* nothing"),
        ({"country": "x", "options": ["a", ""], "answer": "a"}, "column 'options' must hold two texts or more"),
    ],
)
def test_a_bad_row_is_one_line(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=reason) as error:
        find_task(task_file(tmp_path, CAPITALS, [row])).draw_evaluation()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("{my question}", "Why?"), ("{q-x}", "How?"), ("{n.x}?", "1?"), ("{ä}", "Ä"), ("{ ä } {ä}", "{ ä } Ä"),
        ('{"a": {ä}, "b": {}}', '{"a": Ä, "b": {}}'), ("\\\\frac{1}{2}x^{2} {ä}", "\\frac{1}{2}x^{2} Ä"),
        ("{1, 2} {x: 3} {ä}", "{1, 2} {x: 3} Ä"),
        ("{ä:.2f}", None), ("{ä|trim}", None), ("{my-question}", None), ("{n.x[0]}", None), ("{ä!r}", None),
        ("{missing} {ä}", None), ("\\\\boxed{text} {ä}", None),
    ],
)  # fmt: skip
def test_every_column_that_a_prompt_names_is_filled_or_refused(prompt: str, wanted: str | None, tmp_path: Path) -> None:
    row = {"my question": "Why?", "q-x": "How?", "n.x": 1, "ä": "Ä", "answer": 3}
    text = SUMS.replace("{a} + {b} =", prompt.replace('"', '\\"')).replace("answer: sum", "answer: answer")
    task = find_task(task_file(tmp_path, text, [row]))
    if wanted is None:
        with pytest.raises(DataError, match=r"Row evaluation-0: column '.*' must hold .*the columns are my question"):
            task.draw_evaluation()
    else:
        assert task.draw_evaluation()[0].prompt == wanted


def test_a_prompt_of_text_alone_is_refused(tmp_path: Path) -> None:
    text = SUMS.replace("{a} + {b} =", "Write {'sum': 1} or \\\\boxed{1}.")
    with pytest.raises(DataError, match="Row evaluation-0: the prompt must name a column in braces"):
        find_task(task_file(tmp_path, text, [{"sum": 1}])).draw_evaluation()


@pytest.mark.parametrize("answer", ["The sum:\n5", "12:30", "3 apples and 4 pears", "Step 1.\nSo 48+24=72."])
def test_an_answer_that_is_not_one_number_is_refused(answer: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Row evaluation-0: column 'sum' must hold one number, with no more than words"):
        find_task(task_file(tmp_path, SUMS, [{"a": 1, "b": 2, "sum": answer}])).draw_evaluation()
    (example,) = find_task(task_file(tmp_path, SUMS, [{"a": 1, "b": 2, "sum": f"{answer}\n#### 72"}])).draw_evaluation()
    assert parse_answer(example.completion, gold=True) == 72


NUMERALS = 'name: n\nscoring: choice\nevaluation: test.{}\nprompt: "{{q}}"\nchoices: ["1", "2", "3"]\nanswer: a\n'


@pytest.mark.parametrize(("answer", "label"), [(0, " 1"), (3, " 3"), (1, None), (2, None)])
def test_a_numeral_is_the_same_answer_in_every_kind_of_file_and_an_ambiguous_one_is_refused(
    answer: int, label: str | None, tmp_path: Path
) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"q": "how many?", "a": answer}))
    (tmp_path / "test.csv").write_text(f"q,a\nhow many?,{answer}\n")
    for kind in ("jsonl", "csv"):
        (tmp_path / "task.yaml").write_text(NUMERALS.format(kind))
        task = find_task(str(tmp_path / "task.yaml"))
        if label is None:
            with pytest.raises(DataError, match=f"which may be the choice '{answer}' or '{answer + 1}'"):
                task.draw_evaluation()
        else:
            assert task.draw_evaluation()[0].completion == label


def test_without_training_rows_a_task_is_for_evaluation_only(tmp_path: Path) -> None:
    task = find_task(task_file(tmp_path, SUMS, [{"a": 1, "b": 2, "sum": 3}]))
    with pytest.raises(DataError, match="needs rows to train on"):
        task.draw()
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(DataError, match="'evaluation:': there is no file .*test.jsonl"):
        task.draw_evaluation()
