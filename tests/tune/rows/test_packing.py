"""Packed rows hold every token of every document, in order, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import ConfigError
from frozencore.tune.rows import TextRow, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import pack
from frozencore.tune.run.config import make_config
from frozencore.tune.run.read_rows import prepare_rows

DOCUMENTS = [TextRow(f"row-{i}", "", "Tom has cats. " * (1 + 7 * i % 11)) for i in range(9)]


@pytest.mark.parametrize("length", [2, 7, 40, 10_000])
def test_the_tokens_are_those_of_the_documents_and_every_row_but_the_last_is_full(
    length: int, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer(adds_start=True), max_length=8)  # documents may be longer
    documents = encoder.whole_rows(DOCUMENTS)
    rows = pack(documents, length)
    packed = list(chain.from_iterable(row.input_ids for row in rows))
    tokens = list(chain.from_iterable(document.input_ids for document in documents))
    assert packed == tokens[: len(packed)]
    assert len(tokens) - len(packed) == (len(tokens) % length == 1)
    assert {len(row.input_ids) for row in rows[:-1]} <= {length}
    assert packed.count(encoder.eos_id) + (packed != tokens) == len(DOCUMENTS)
    assert {row.num_context for row in rows} == {0}


def test_a_last_token_alone_has_nothing_before_it_and_is_left_out() -> None:
    assert [row.input_ids for row in pack([TokenRow("a", [1, 2, 3, 4, 5], 0)], 4)] == [[1, 2, 3, 4]]


def test_a_run_packs_what_it_trains_on_calibrates_on_and_scores_each_by_itself(
    tmp_path: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} cats " * (1 + i % 9)}) + "\n" for i in range(60)))
    encoder = PromptEncoder(byte_tokenizer(), max_length=64)
    asked = {"model": "any", "data": path, "calibration_size": 5, "select_checkpoint": "epoch"}
    alone = prepare_rows(make_config(**asked), PromptEncoder(byte_tokenizer(), max_length=200))
    rows = prepare_rows(make_config(**asked, packing=True), encoder)
    assert rows.validation is not None
    assert alone.validation is not None
    for packed, own in ((rows.train, alone.train), (rows.held_out, alone.held_out),
                        (rows.validation.tokens, alone.validation.tokens)):  # fmt: skip
        assert [i for row in packed for i in row.input_ids] == [i for row in own for i in row.input_ids]
    assert len(rows.calibration) == 5
    assert all(row in rows.train for row in rows.calibration)
    assert rows.reading is not None
    assert rows.reading.in_words == (
        f"Read 60 rows by text; none left out; those to train on are packed to {len(rows.train)}."
    )


def test_prompts_are_not_packed(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(ConfigError, match="is for rows of text, but .* has prompt and completion"):
        prepare_rows(make_config(model="any", data=path, packing=True), PromptEncoder(byte_tokenizer()))
    with pytest.raises(ConfigError, match="leave --truncate and --skip-long out"):
        make_config(model="any", data=path, packing=True, skip_long=True)
    with pytest.raises(ConfigError, match="--packing is for your own rows"):
        make_config(model="any", task="sst2", packing=True)
