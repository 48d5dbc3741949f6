"""The user's own rows: three formats in two kinds of file, and one line for everything that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from frozencore.errors import ConfigError, DataError
from frozencore.lab.rows.own_rows import read_rows
from frozencore.lab.rows.prompts import PromptEncoder

PAIR = {"prompt": "Capital of France?", "completion": " Paris"}
MESSAGES = {"messages": [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "Paris"}]}
TEXT = {"text": "Paris is a capital."}


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_each_format_puts_the_loss_where_it_belongs(
    tmp_path: Path, suffix: str, byte_tokenizer: Callable[..., Any]
) -> None:
    encoder = PromptEncoder(byte_tokenizer(adds_start=True, chat=True))
    for row, context, completion in (
        (PAIR, "<s>user\nCapital of France?</s>\n<s>assistant\n", "Paris</s>"),
        (MESSAGES, "<s>user\nCapital?</s>\n<s>assistant\n", "Paris</s>"),
        (TEXT, "<s>", "Paris is a capital.</s>"),
    ):
        texts = read_rows(write(tmp_path / f"rows{suffix}", [row, row]), encoder)
        assert [text.id for text in texts] == ["row-1", "row-2"]
        tokens = encoder.training_rows(texts)[1]
        assert encoder.tokenizer.decode(tokens.input_ids[: tokens.num_context]) == context
        assert encoder.tokenizer.decode(tokens.input_ids[tokens.num_context :]) == completion


def test_plain_pairs_keep_their_own_separator(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    (text,) = read_rows(write(tmp_path / "rows.jsonl", [PAIR]), PromptEncoder(byte_tokenizer()))
    assert text.context + text.completion == "Capital of France? Paris"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "holds no rows"),
        ([{"question": "a"}], "needs the columns prompt and completion, or messages, or text, but row 1 has question"),
        ([PAIR, {"prompt": "a"}], r"Row row-2: column 'completion' must hold text, but holds nothing"),
        ([PAIR, PAIR, {"prompt": "a", "completion": ""}], r"Row row-3: column 'completion'"),
        ([{"text": 3}], r"Row row-1: column 'text' must hold text, but holds 3"),
        ([MESSAGES, {"messages": MESSAGES["messages"][:1]}], r"Row row-2: 'messages' must end with the assistant"),
        ([{"messages": "hello"}], r"Row row-1: column 'messages' must hold a list"),
        ([{"messages": [{"role": "user"}]}], r"Row row-1: column 'content'"),
        ([PAIR, 5], r"line 2: each line must be a JSON object"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_row(
    tmp_path: Path, rows: list[Any], reason: str, byte_tokenizer: Callable[..., Any]
) -> None:
    with pytest.raises(DataError, match=reason) as error:
        read_rows(write(tmp_path / "rows.jsonl", rows), PromptEncoder(byte_tokenizer(chat=True)))
    assert "\n" not in str(error.value)


def test_broken_and_missing_files_are_one_line(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "\xff\xfe"}\n')
    (tmp_path / "d.csv").write_text("text\na\n")
    for name, reason in (
        ("a.jsonl", "line 2"),
        ("b.parquet", "cannot be read as Parquet"),
        ("c.jsonl", "must be UTF-8"),
        ("d.csv", "a .jsonl or .parquet file"),
        ("e.jsonl", "there is no file"),
    ):
        with pytest.raises(DataError, match=reason) as error:
            read_rows(tmp_path / name, encoder)
        assert "\n" not in str(error.value)


def test_messages_need_a_chat_template(tmp_path: Path, byte_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="need a chat template"):
        read_rows(write(tmp_path / "rows.jsonl", [MESSAGES]), PromptEncoder(byte_tokenizer()))
