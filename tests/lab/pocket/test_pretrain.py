"""The pretraining script, run for a few steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozencore.lab.pocket.pretrain import Recipe, pretrain

TINY = replace(Recipe(), window=32, batch=4, num_corpus_tokens=20_000, num_tokenizer_documents=500)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    outs = tuple(tmp_path_factory.mktemp("pretrain") / name for name in ("first", "second"))
    for out in outs:
        pretrain(out, recipe=TINY, num_steps=8, minutes=None)
    return outs[0], outs[1]


def test_the_same_seed_gives_the_same_weights(two_runs: tuple[Path, Path]) -> None:
    first, second = (AutoModelForCausalLM.from_pretrained(out).state_dict() for out in two_runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_folder_loads_and_nothing_is_left_beside_it(two_runs: tuple[Path, Path]) -> None:
    for out in two_runs:
        assert AutoTokenizer.from_pretrained(out).eos_token == "<|endoftext|>"
        assert [path.name for path in out.parent.iterdir()] == [out.name]
        assert "not** a reproduction" in (out / "README.md").read_text()


def test_minutes_choose_the_number_of_steps(tmp_path: Path) -> None:
    report = pretrain(tmp_path / "model", recipe=TINY, num_steps=None, minutes=0.01)
    assert report.num_steps >= 1
    assert report.num_tokens == report.num_steps * TINY.batch * TINY.window
