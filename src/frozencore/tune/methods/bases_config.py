"""Which model a run adapts, by which method, and between which bases."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, model_validator

from frozencore.constructors import BasisOptions, refuse_unread
from frozencore.constructors.basis_options import Rank, RankBudget
from frozencore.errors import ConfigError
from frozencore.options import FrozenOptions
from frozencore.tune.methods import Method, Targets, find_method
from frozencore.tune.methods.option_groups import read_group


class BasesConfig(FrozenOptions):
    """The model, and what is trained on it."""

    model: Annotated[
        str,
        Field(
            description="Hub id, local folder or GGUF file of a causal language model; pocket is the one shipped here, "
            "smollm2 the one that `make smollm2` fetches."
        ),
    ]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Field(description="Of the base model's weights.")
    ] = "auto"
    method: Annotated[str, Field(description="What to train.")] = "fcca"
    rank: Rank = BasisOptions.rank
    rank_budget: RankBudget = None
    targets: Annotated[
        Targets | None,
        Field(description="Layer names, or all-linear. Default: the attention projections; with full, every weight."),
    ] = None
    layers: Annotated[
        int | None, Field(ge=1, description="Adapt the targets in that many last blocks alone. Default: in all.")
    ] = None
    basis: Annotated[
        str | None,
        Field(
            description="Train on a saved basis instead of choosing one: its folder or hub id. Method, rank, targets "
            "and scale are its own, and the adapter is saved as cores alone."
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
        """The row of the method table."""
        return find_method(self.method)
