"""A configuration that cannot run is refused in one line; one that can is complete."""

from __future__ import annotations

from typing import Any

import pytest

from frozencore.errors import ConfigError
from frozencore.tune.config import make_config
from frozencore.tune.methods import METHODS

GOOD: dict[str, Any] = {"model": "somewhere", "task": "svamp"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": None}, "give --data FILE, or --data task:NAME"),
        ({"data": "rows.jsonl"}, "--task svamp is --data task:svamp. Leave one of them out"),
        ({"task": None, "data": ("task:sst2", "a.jsonl")}, "stands alone"),
        ({"task": ["svamp"]}, "no task"),
        ({"task": None, "data": ("a.jsonl", "a.jsonl")}, "Each --data is another source, but a.jsonl comes twice"),
        ({"eval_data": "held.jsonl"}, "is for your own rows"),
        (
            {"task": None, "data": "a.jsonl", "eval_data": "task:sst2"},
            "is for your own rows, but task:sst2",
        ),
        ({"loss_on": "all"}, "is for your own rows"),
        ({"task": "svmp"}, "Did you mean 'svamp'"),
        ({"method": "fca"}, "Did you mean 'fcca'"),
        *(({"select_checkpoint": came}, "--select-checkpoint") for came in (0, "never", True, 2.5)),
        ({"warmup": 1.5}, "--warmup"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"calibration_size": 0}, "--calibration-size"),
        ({"prompt_style": "latin"}, "--prompt-style"),
        ({"unheard_of": 1}, "There is no option 'unheard_of'"),
        ({"core": {"whitening": "both"}}, "Did you mean 'whiten'?"),
        ({"core": 3}, "core must hold options by name"),
        ({"seed": 2**32}, "--seed"),
        ({"method": "lora", "core": {"whiten": "input"}}, "'lora' does not read whiten .it is for fcca.. Leave"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_config(**{**GOOD, **values})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_a_recipe_is_the_methods_own_where_a_run_does_not_say(method: str) -> None:
    entry, own = METHODS[method], make_config(**GOOD, method=method).training
    said = make_config(**GOOD, method=method, learning_rate=1e-4, warmup=0.0).training
    assert (own.learning_rate, own.warmup) == ("auto", None)
    assert own.rate_of(entry) == entry.learning_rate
    assert (own.rate_of(entry) is None) == entry.has_bases  # measured on the rows
    assert own.warmup_of(entry) == entry.warmup == 0.1
    assert (said.rate_of(entry), said.warmup_of(entry)) == (1e-4, 0.0)
