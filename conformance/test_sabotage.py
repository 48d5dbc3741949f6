"""A suite that passes whatever the tuner does would prove nothing: two sabotaged tuners must fail it.

Run with ``make test-slow``; needs PEFT's tests, which ``make conformance`` fetches.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run import run_suite

PART = "MLP and (merge or unmerge or disable_adapters or unload)"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "unmerge", "scale"], ids=["sound", "unmerge does nothing", "delta is unscaled"])
def test_the_suite_notices_a_broken_tuner(fault: str) -> None:
    result = run_suite("random", sabotage=fault, select=PART, files=["custom_models"])
    failing = {case.split("::")[-1].split("[")[0] for case in result["failures"]}
    assert result["passed"] > 60
    assert failing >= ({"test_merge_layers", "test_disable_adapters_with_merging"} if fault else set())
    assert bool(failing) == bool(fault)
