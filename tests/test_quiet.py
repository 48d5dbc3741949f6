"""The screen of a command is its own: what other libraries print there, and what they print elsewhere."""

from __future__ import annotations

import logging

import pytest
from transformers.utils import logging as of_transformers

from frozencore.quiet import ignore_known_warnings
from frozencore.tune.load import quiet_loading

OF_BITSANDBYTES = "bitsandbytes.backends.cpu.ops"


def test_a_command_leaves_out_the_line_on_a_missing_kernel_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    ignore_known_warnings()
    logger = logging.getLogger(OF_BITSANDBYTES)
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure", "no kernels")
    logger.warning("Another warning of bitsandbytes")
    assert [record.getMessage() for record in caplog.records] == ["Another warning of bitsandbytes"]


def test_loading_is_quiet_and_then_transformers_speaks_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    of_transformers.enable_progress_bar()
    before = of_transformers.get_verbosity()
    with quiet_loading():
        assert list(of_transformers.tqdm(range(3), desc="Loading weights")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert (of_transformers.get_verbosity(), of_transformers.is_progress_bar_enabled()) == (before, True)
    assert list(of_transformers.tqdm(range(3), desc="Loading weights")) == [0, 1, 2]
    assert "Loading weights" in capsys.readouterr().err
