"""Properties of what is read from files and options: any value is taken and kept, or refused in our words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fixtures import tried
from frozencore.errors import ConfigError, FrozenCoreError
from frozencore.files.strict_yaml import read_yaml
from frozencore.options import COMMAND_NAMES
from frozencore.tune.config import make_config, run_options
from frozencore.tune.methods import METHODS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=6,
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\x00"), min_size=1, max_size=12)


def attempt(call: Callable[[], Any], refusal: type[FrozenCoreError]) -> Any:
    """The result of a call; None if it raises an error of one line."""
    found, caught = None, None
    try:
        found = call()
    except refusal as error:
        caught = str(error)
    assert caught is None or caught.isprintable()
    return found


# ---------------------------------------------------------------------------------------------------------- RunConfig


@given(st.sampled_from(sorted({*run_options(), "core", "calibration"})), JSON)
@tried(5)
def test_any_value_of_any_option_is_taken_or_refused_in_one_line(option: str, value: Any) -> None:
    config = attempt(lambda: make_config(**{"model": "pocket", "task": "pocket-math", option: value}), ConfigError)
    assert config is None or make_config(**json.loads(json.dumps(config.content()))).content() == config.content()


@given(
    method=st.sampled_from(list(METHODS)),
    rank=st.integers(1, 512),
    learning_rate=st.just("auto") | st.floats(1e-8, 1),
    warmup=st.none() | st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    targets=st.none() | st.just("all-linear") | st.lists(NAMES, min_size=1, max_size=3).map(tuple),
)
def test_a_configuration_survives_its_record(**options: Any) -> None:
    unread = {COMMAND_NAMES.get(name, name) for name in METHODS[options["method"]].unread}
    read = {name: value for name, value in options.items() if name not in unread}
    config = make_config(model="pocket", task="pocket-math", **read)
    again = make_config(strict=True, **json.loads(json.dumps(config.content())))
    assert again.content() == config.content()  # "core" alone tells given options from defaults
    with pytest.raises(FrozenInstanceError):
        config.method.r = 3  # type: ignore[misc]


@given(JSON)
def test_json_as_we_write_it_is_yaml_and_means_the_same(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False) if _is_json(value) else "1"
    assume(not set(text) & set("\x85\u2028\u2029\ufeff"))  # to YAML these are line breaks and byte order marks
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            read = read_yaml(path)
        except FrozenCoreError:
            return  # YAML has no \ud800 and no control characters
        assert read == json.loads(text)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True
