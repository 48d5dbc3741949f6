"""The base of every part of a record, and the types of its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
DIGITS = 6


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Finite = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""A measured number; None if it was not finite."""


class RecordPart(BaseModel):
    """A strict, frozen model that keeps unknown keys, from a later version."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    def content(self) -> dict[str, Any]:
        """The given fields as JSON values by key."""
        return self.model_dump(mode="json", exclude_unset=True)


def rounded(values: Iterable[float]) -> tuple[float, ...]:
    """The values with six digits, because a record may have hundreds of layers and rows; counts as they are."""
    return tuple(value if isinstance(value, int) else float(f"{value:.{DIGITS}g}") for value in values)
