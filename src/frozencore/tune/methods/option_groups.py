"""Options that a run's configuration holds in groups: those of the cores, and those of the calibration pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from pydantic import BaseModel, create_model

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.constructors import CONSTRUCTORS, constructor_options
from frozencore.constructors.basis_options import ScaleOptions
from frozencore.options import FrozenOptions, Option, options_of


def _core_options() -> dict[str, Option]:
    return {**options_of(ScaleOptions), **constructor_options()}


def _pass_options() -> dict[str, Option]:
    own = ("seed", "memory_budget")  # of the run, under the same names
    return {name: option for name, option in options_of(CalibrationOptions).items() if name not in own}


GROUPS: dict[str, Callable[[], dict[str, Option]]] = {"core": _core_options, "calibration": _pass_options}
"""Options that a configuration holds in a group: those of the cores, as the table of constructors has them at the time,
and those of the calibration pass."""


@cache
def _model(group: str, _table: tuple[type, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (option.type, option.default) for name, option in GROUPS[group]().items()}
    return create_model(group, __base__=FrozenOptions, **fields)


def read_group(given: Any, group: str) -> BaseModel:
    """The options of a group, checked; as they are where they have been."""
    if isinstance(given, BaseModel):
        return given
    model = _model(group, tuple(row.options for row in CONSTRUCTORS.values()))
    # through JSON, in which a list may become a tuple and text never becomes a number
    return model.model_validate_json(json.dumps(given, default=str), strict=True)
