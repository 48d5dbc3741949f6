"""The options of a run by name, as people give them: whichever group of its configuration holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from functools import cache
from typing import Any, get_type_hints

from frozencore.errors import ConfigError
from frozencore.options import Option
from frozencore.tune.methods.option_groups import GROUPS
from frozencore.tune.run.config import RunConfig
from frozencore.tune.training.recipe_config import StepsConfig

SWEPT = tuple(StepsConfig.model_fields)
"""The options whose values may differ between runs on one basis."""


def run_options() -> dict[str, Option]:
    """Every option of a run by its name, those of the groups among them."""
    full, plain = _types_of_options()
    found: dict[str, Option] = {}
    for name, field in RunConfig.model_fields.items():
        default = MISSING if field.is_required() else field.get_default()
        own = GROUPS[name]() if name in GROUPS else {name: Option(name, full[name], plain[name], default)}
        if twice := found.keys() & own.keys():
            raise ConfigError(f"An option has one meaning, but {min(twice)!r} has two. Rename that of the constructor.")
        found |= own
    return found


@cache  # evaluating them takes longer than all else that is done with a campaign's specification
def _types_of_options() -> tuple[dict[str, Any], dict[str, Any]]:
    """With what their annotations add, and plain."""
    return get_type_hints(RunConfig, include_extras=True), get_type_hints(RunConfig)


def in_groups(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run by name as its configuration holds them: some in their group."""
    values = dict(options)
    for group, own in GROUPS.items():
        values[group] = {name: values.pop(name) for name in own() if name in values}
    return values
