"""The table of tasks."""

from __future__ import annotations

import pytest

from frozencore.errors import ConfigError
from frozencore.tune.suite import TASKS, find_task


def test_every_task_is_found_by_its_own_name() -> None:
    assert {"svamp", "sst2"} < set(TASKS)
    assert all(find_task(name).name == name for name in TASKS)


def test_an_unknown_task_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no task 'SST-2'. Did you mean 'sst2'\? Known: svamp, gsm8k, ") as error:
        find_task("SST-2")
    assert "\n" not in str(error.value)
