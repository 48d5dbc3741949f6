"""Rows of a run: of its own task, or of another one to calibrate on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import DataError
from frozencore.lab.rows.prompts import PromptEncoder
from frozencore.lab.run.config import RunConfig, make_config
from frozencore.lab.run.rows import prepare_rows


@pytest.fixture
def encoder(byte_tokenizer: Callable[..., Any]) -> PromptEncoder:
    return PromptEncoder(byte_tokenizer())


def config_of(**options: Any) -> RunConfig:
    return make_config(**{"model": "any", "calibration_size": 5, **options})


def test_a_task_that_is_trained_on_whole_leaves_no_row_to_validate_on_and_says_so(encoder: PromptEncoder) -> None:
    whole = {"task": "pocket-sentiment", "paper_steps": True, "num_train": 10_000, "num_evaluation": 10_000}
    with pytest.raises(DataError, match=r"'pocket-sentiment' leaves no validation rows\. Train on fewer"):
        prepare_rows(config_of(**whole, evaluate_on="validation"), encoder)


def test_rows_of_another_task_calibrate_and_only_calibrate(encoder: PromptEncoder, tmp_path: Path) -> None:
    other = prepare_rows(config_of(task="pocket-comparison", num_evaluation=2), encoder)
    few = {"num_train": 12, "num_evaluation": 3}
    own = prepare_rows(config_of(task="pocket-sentiment", **few), encoder)
    across = prepare_rows(config_of(task="pocket-sentiment", calibration_task="pocket-comparison", **few), encoder)
    assert (across.train, across.held_out) == (own.train, own.held_out)
    assert across.calibration == other.calibration != own.calibration

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"Tom has {i} cats."}) + "\n" for i in range(9)))
    of_file = prepare_rows(config_of(data=path, calibration_task="pocket-comparison"), encoder)
    assert of_file.calibration == other.calibration
    assert len(of_file.train) == 8
