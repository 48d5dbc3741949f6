"""An adapter that was never calibrated changes nothing, which is said wherever it comes or leaves."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from peft import PeftModel

from adapted import adapted
from frozencore.adapter.saved.state import UncalibratedWarning
from frozencore.tune.evaluation.adapters import BaseWithAdapter
from tiny import tiny_qwen2

SAID = "was never calibrated: its bases are zero"


@pytest.fixture
def uncalibrated(tmp_path: Path) -> Path:
    with pytest.warns(UncalibratedWarning, match=SAID):
        adapted("fcca", calibrated=False).save_pretrained(str(tmp_path))
    return tmp_path


def test_loading_an_adapter_that_was_never_calibrated_says_so(uncalibrated: Path) -> None:
    with pytest.warns(UncalibratedWarning, match=SAID):
        model = PeftModel.from_pretrained(tiny_qwen2(), str(uncalibrated))
    with pytest.warns(UncalibratedWarning, match=SAID):
        model.load_adapter(str(uncalibrated), adapter_name="second")
    with pytest.warns(UncalibratedWarning, match=SAID):
        BaseWithAdapter(tiny_qwen2()).with_adapter(uncalibrated)


@pytest.mark.parametrize("way", ["merge_adapter", "merge_and_unload"])
def test_merging_an_adapter_that_was_never_calibrated_says_so(way: str) -> None:
    with pytest.warns(UncalibratedWarning, match=SAID):
        getattr(adapted("fcca", calibrated=False), way)()


def test_nothing_is_said_of_a_calibrated_adapter(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncalibratedWarning)
        adapted("fcca").save_pretrained(str(tmp_path))
        PeftModel.from_pretrained(tiny_qwen2(), str(tmp_path)).merge_and_unload()
        adapted("fcca", calibrated=False).unload()
