"""Which rows are drawn: the protocol's rule, checked on generated sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import DataError
from frozencore.tune.rows.row import Row
from frozencore.tune.rows.splits import calibration_rows
from frozencore_lab.tasks.registry import TASKS
from frozencore_lab.tasks.task import Split, Task, question_of


@dataclass(frozen=True)
class ListSource:
    texts: Mapping[str, Sequence[str]]

    def rows(self, split: Split, data_root: Path | None) -> Sequence[Mapping[str, Any]]:
        return [{"text": text} for text in self.texts.get(split, ())]


def task(num_train: int = 20, num_evaluation: int = 5, **texts: Sequence[str]) -> Task:
    return Task(
        name="made",
        scoring="exact_match",
        source=ListSource(texts),
        to_row=lambda row, row_id: Row(row_id, row["text"], " 1"),
        num_train=num_train,
        num_evaluation=num_evaluation,
        epochs=1,
        licence="none",
    )


def texts(prefix: str, count: int) -> list[str]:
    return [f"{prefix} {i}" for i in range(count)]


def ids(examples: Sequence[Row]) -> list[str]:
    return [example.id for example in examples]


@pytest.mark.parametrize(
    ("train", "validation", "train_on_all", "sizes", "source"),
    [
        (texts("t", 23), texts("v", 9), False, (20, 3), "unused train rows"),
        (texts("t", 20), texts("v", 9), False, (20, 5), "official validation"),
        (texts("t", 20), (), False, (18, 2), "10% of train"),
        (texts("t", 20), texts("v", 3), True, (20, 3), "official validation"),
        (texts("t", 20), (), True, (20, 0), "none"),
        ([*texts("t", 10), *texts(" t", 10)], (), False, None, "10% of train"),
        (["t"], (), False, (1, 0), "none"),
        (["t", " t"], (), False, (2, 0), "none"),  # no way to divide them
    ],
)
def test_validation_rows_are_unused_ones_else_the_official_ones_else_a_tenth(
    train: list[str], validation: list[str], train_on_all: bool, sizes: tuple[int, int] | None, source: str
) -> None:
    made = task(train=train, evaluation=texts("e", 9), validation=validation)
    splits = made.draw(train_on_all=train_on_all)
    assert (splits.validation_from, len(splits.evaluation)) == (source, 5)
    assert sizes is None or (len(splits.train), len(splits.validation)) == sizes
    validated = {question_of(example) for example in splits.validation}
    assert not validated & {question_of(example) for example in splits.train}


def test_no_evaluated_text_is_trained_on_however_it_is_spelled() -> None:
    train = [*texts("t", 20), "e  3 ", "cafe\u0301", "E 3", "e-3", "e 3 🙂", "e ３"]
    splits = task(train=train, evaluation=[*texts("e", 4), "caf\u00e9"]).draw()
    evaluated = {question_of(example) for example in splits.evaluation}
    assert splits.left_out == {"also evaluation rows": 2}
    assert len(splits.train) == 24 - len(splits.validation)
    assert not evaluated & {question_of(example) for example in splits.train + splits.validation}


def test_the_evaluation_subset_depends_on_ids_alone() -> None:
    few = task(train=texts("t", 30), evaluation=texts("e", 9)).draw(num_train=3)
    many = task(train=texts("u", 99), evaluation=texts("f", 9)).draw(num_train=25)
    assert ids(few.evaluation) == ids(many.evaluation)
    assert few.evaluation != task(train=texts("t", 30), evaluation=texts("e", 9)).draw(seed=1).evaluation


def test_the_drawn_ids_never_change() -> None:
    """Results are comparable over the years only if this list stays as it is."""
    drawn = task(evaluation=texts("e", 1000)).draw_evaluation(num_evaluation=5)
    assert ids(drawn) == ["evaluation-889", "evaluation-576", "evaluation-288", "evaluation-163", "evaluation-52"]


def test_evaluation_rows_are_those_of_the_split_and_need_no_training_rows() -> None:
    both = task(train=texts("t", 30), evaluation=texts("e", 9))
    assert both.draw_evaluation() == both.draw().evaluation
    assert task(evaluation=texts("e", 9)).draw_evaluation(num_evaluation=100)[:5] == both.draw().evaluation
    with pytest.raises(DataError, match="needs rows to evaluate on, but has none"):
        task(train=texts("t", 3)).draw_evaluation()


def test_calibration_rows_are_training_rows() -> None:
    train = task(train=texts("t", 30), evaluation=texts("e", 9)).draw().train
    drawn = calibration_rows(train, 8)
    assert len(set(ids(drawn))) == 8
    assert set(ids(drawn)) <= set(ids(train))
    assert drawn == calibration_rows(train, 8)
    assert len(calibration_rows(train, 1000)) == len(train)


def test_a_task_whose_training_rows_are_all_evaluated_is_refused() -> None:
    with pytest.raises(DataError, match="needs rows to train on"):
        task(train=texts("e", 3), evaluation=texts("e", 3)).draw()


REAL_TRAIN = {
    "svamp": 630, "gsm8k": 1500, "sst2": 2000, "qnli": 1800, "cola": 2000, "arc_challenge": 1119, "hellaswag": 2000,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_TRAIN)
def test_real_splits_have_the_protocols_sizes(name: str, shared_data: Path) -> None:
    real = TASKS[name]
    splits = real.draw(shared_data)
    assert len(splits.evaluation) == real.num_evaluation
    assert len(splits.train) == REAL_TRAIN[name]
    assert len(real.draw(shared_data, train_on_all=True).train) == real.num_train
    evaluated = {question_of(example) for example in splits.evaluation}
    assert not evaluated & {question_of(example) for example in splits.train + splits.validation}


def test_pocket_splits_are_disjoint() -> None:
    for real in TASKS.values():
        if not hasattr(real.source, "path"):
            splits = replace(real, num_train=50, num_evaluation=20).draw()
            assert splits.validation_from == "unused train rows"
            assert (len(splits.train), len(splits.evaluation)) == (50, 20)
