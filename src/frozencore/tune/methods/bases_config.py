"""The options of the model, the method and its bases, and the groups of core and calibration options."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, create_model, model_validator

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.constructors import CONSTRUCTORS, BasisOptions, constructor_options, refuse_unread
from frozencore.constructors.basis_options import Rank, ScaleOptions
from frozencore.errors import ConfigError
from frozencore.options import FrozenOptions, Option, options_of
from frozencore.tune.methods import Method, Targets, find_method


def _core_options() -> dict[str, Option]:
    return {**options_of(ScaleOptions), **constructor_options()}


def _pass_options() -> dict[str, Option]:
    own = ("seed", "memory_budget")  # of the run, under the same names
    return {name: option for name, option in options_of(CalibrationOptions).items() if name not in own}


GROUPS: dict[str, Callable[[], dict[str, Option]]] = {"core": _core_options, "calibration": _pass_options}
"""The groups of options in a configuration: of the cores, as the current table of constructors has them, and of the
calibration pass."""


@cache
def _model(group: str, _table: tuple[type, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (option.type, option.default) for name, option in GROUPS[group]().items()}
    return create_model(group, __base__=FrozenOptions, **fields)


def read_group(given: Any, group: str) -> BaseModel:
    """Check the options of a group; options that were checked before are returned unchanged."""
    if isinstance(given, BaseModel):
        return given
    model = _model(group, tuple(row.options for row in CONSTRUCTORS.values()))
    # through JSON, in which a list may become a tuple and text never becomes a number
    return model.model_validate_json(json.dumps(given, default=str), strict=True)


class BasesConfig(FrozenOptions):
    """The model, and the values to train on it."""

    model: Annotated[
        str,
        Field(
            description="Hub id, local folder or GGUF file of a causal language model. pocket: the model shipped with "
            "frozencore; smollm2: the model that `make smollm2` fetches."
        ),
    ]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Field(description="Dtype of the base model's weights.")
    ] = "auto"
    method: Annotated[str, Field(description="What to train.")] = "fcca"
    rank: Rank = BasisOptions.rank
    targets: Annotated[
        Targets | None,
        Field(
            description="Layers to adapt: names, or all-linear. Default: the attention projections; for full, every "
            "weight."
        ),
    ] = None
    layers: Annotated[int | None, Field(ge=1, description="Adapt only the last so many blocks. Default: all.")] = None
    basis: Annotated[
        str | None,
        Field(
            description="Train on a saved basis, given by its folder or hub id. It determines method, rank, targets "
            "and scale, and the adapter is saved as cores only."
        ),
    ] = None
    core: Annotated[SerializeAsAny[BaseModel], BeforeValidator(partial(read_group, group="core"))] = Field(
        default_factory=partial(read_group, {}, "core")
    )

    @model_validator(mode="after")
    def _fit_the_method(self) -> BasesConfig:
        find_method(self.method)
        refuse_unread(self.method, self.core.model_dump(exclude_defaults=True))
        if self.basis is not None and self.layers is not None:
            raise ConfigError("A saved basis has its own layers: leave --layers out.")
        return self

    @property
    def method_entry(self) -> Method:
        """The method's row in the table of methods."""
        return find_method(self.method)
