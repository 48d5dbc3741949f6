"""Rows of several sources in the proportion of their weights, the same ones in every run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import ConfigError, DataError
from frozencore.tune.rows import TextRow
from frozencore.tune.rows.mixture import Data, WeightedSource, draw, read_sources, sources_of
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.run.config import make_config
from frozencore.tune.run.read_rows import prepare_rows
from frozencore.tune.run.row_sets import RunRows


def write(path: Path, count: int, kind: str = "cats") -> str:
    rows = [{"prompt": f"{i} {kind}?", "completion": f" {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "a.jsonl", 300), write(tmp_path / "b.jsonl", 50, "dogs")


def rows_of(encoder: PromptEncoder, data: Any, **options: Any) -> RunRows:
    return prepare_rows(make_config(model="any", data=data, **options), encoder)


def kinds(encoder: PromptEncoder, rows: RunRows) -> Counter[str]:
    texts = [encoder.tokenizer.decode(row.input_ids) for row in (*rows.train, *rows.held_out)]
    return Counter("cats" if "cats" in text else "dogs" for text in texts)


def parts(*counts: int) -> list[list[TextRow]]:
    return [[TextRow(f"{k}:row-{i}", "", "x") for i in range(count)] for k, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("counts", "weights", "drawn"),
    [
        ((300, 50), (2.0, 1.0), (100, 50)),
        ((300, 50), (1.0, 1.0), (50, 50)),
        ((30, 500), (0.5, 2.0), (30, 120)),
        ((3, 1000), (1.0, 0.001), (3, 1)),
        ((300, 50), (None, None), (300, 50)),
    ],
)
def test_the_weights_are_the_proportion_and_as_many_rows_as_it_allows_are_drawn(
    counts: tuple[int, ...], weights: tuple[float | None, ...], drawn: tuple[int, ...]
) -> None:
    found = draw(parts(*counts), weights)
    assert tuple(map(len, found)) == drawn
    assert found == draw(parts(*counts), weights)
    for part, every in zip(found, parts(*counts), strict=True):
        assert len({row.id for row in part}) == len(part)
        assert [row for row in every if row in part] == part


def test_a_run_trains_and_holds_out_in_that_proportion_and_says_what_came_of_each_file(
    files: tuple[str, str], byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    rows = rows_of(encoder, [f"{files[0]}=2", files[1]])
    assert kinds(encoder, rows) == {"cats": 100, "dogs": 50}
    assert len(rows.held_out) == 15
    assert rows.reading is not None
    assert rows.reading.left_out == {"beyond the weights": 200}
    assert rows.reading.in_words == (
        "Read 350 rows by prompt and completion; 200 left out (beyond the weights). "
        f"{files[0]}: 100 of 300 rows; {files[1]}: 50 of 50 rows."
    )
    other_seed = rows_of(encoder, [f"{files[0]}=2", files[1]], seed=7)
    assert other_seed.fingerprints["train"] == rows.fingerprints["train"]


def test_without_weights_all_rows_of_all_files_are_taken(
    files: tuple[str, str], byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    assert kinds(encoder, rows_of(encoder, list(files))) == {"cats": 300, "dogs": 50}


def test_one_file_in_a_list_is_the_file(files: tuple[str, str], byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    assert make_config(model="any", data=[files[0]]) == make_config(model="any", data=files[0])
    assert rows_of(encoder, [files[0]]).fingerprints == rows_of(encoder, files[0]).fingerprints


def test_each_file_has_its_own_form_and_an_error_names_the_file(
    tmp_path: Path, files: tuple[str, str], byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    (tmp_path / "t.jsonl").write_text('{"text": "plain"}\n')
    read = read_sources((files[0], str(tmp_path / "t.jsonl")), encoder)
    assert [own.columns for _, own in read] == [("prompt", "completion"), ("text",)]
    (tmp_path / "bad.jsonl").write_text('{"text": "plain"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"Row 2:bad.jsonl:row-2: column 'text' must hold text, but holds 3"):
        read_sources((files[0], str(tmp_path / "bad.jsonl")), encoder)


def test_a_name_with_an_equals_sign_is_a_file_where_there_is_one(tmp_path: Path) -> None:
    odd = write(tmp_path / "a=2", 1)
    assert sources_of(odd) == [WeightedSource(odd)]
    assert sources_of(("x:train[:10]=1.5", "y.csv")) == [
        WeightedSource("x:train[:10]", 1.5),
        WeightedSource("y.csv", 1.0),
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("a.jsonl=2", "A weight is a number above 0 of one source beside others"),
        (("a.jsonl=0", "b.jsonl"), "A weight is a number above 0"),
        (("a.jsonl", "a.jsonl=2"), "Each --data is another source, but a.jsonl comes twice"),
    ],
)
def test_a_weight_that_means_nothing_is_refused_in_one_line(data: Data, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        sources_of(data)
    assert "\n" not in str(error.value)


def test_rows_to_evaluate_on_come_from_a_file_of_their_own_and_are_never_trained_on(
    tmp_path: Path, files: tuple[str, str], byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    held = write(tmp_path / "held.jsonl", 20)  # read like the first 20 of a.jsonl
    rows = rows_of(encoder, files[0], eval_data=held)
    assert (len(rows.train), len(rows.held_out)) == (280, 20)
    trained = {tuple(row.input_ids) for row in rows.train}
    assert not trained & {tuple(row.input_ids) for row in rows.held_out}
    assert rows.reading is not None
    assert rows.reading.left_out == {"also in --eval-data": 20}
    assert rows.reading.held_out_from == "held.jsonl"
    assert rows.reading.in_words.endswith("Held-out rows are those of held.jsonl.")
    assert len(rows_of(encoder, files[0], eval_data=held, num_evaluation=5).held_out) == 5


def test_options_are_chosen_on_training_rows_not_on_the_file_of_held_out_rows(
    tmp_path: Path, files: tuple[str, str], byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    held = write(tmp_path / "held.jsonl", 20, "dogs")
    rows = rows_of(encoder, files[0], eval_data=held, evaluate_on="validation")
    assert (len(rows.train), len(rows.held_out)) == (270, 30)
    assert kinds(encoder, rows) == {"cats": 300}


def test_a_task_has_rows_to_evaluate_on_of_its_own() -> None:
    for option in ({"eval_data": "held.jsonl"}, {"loss_on": "all"}):
        with pytest.raises(ConfigError, match="is for your own rows"):
            make_config(model="any", task="sst2", **option)


def test_loss_on_all_turns_takes_conversations(files: tuple[str, str], byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=True), loss_on="all")
    with pytest.raises(ConfigError, match="--loss-on all is about conversations, but .*a.jsonl holds none"):
        rows_of(encoder, files[0], loss_on="all")
