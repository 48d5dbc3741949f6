"""The shape of what a run leaves: whatever plans and reports compute with has its type. The rest is as it came."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Config(_Shape):
    rank: Count | None = None
    core: dict[str, Any] = {}


class _Hashes(_Shape):
    model: str


class _Source(_Shape):
    versions: dict[str, str] = {}


class _Training(_Shape):
    num_steps: Count


class _Resources(_Shape):
    trainable_parameters: Count | None = None
    magnitude_parameters: Count | None = None
    optimizer_bytes: Count | None = None
    adapter_bytes: Count | None = None
    adapter_bytes_without_bases: Count | None = None
    peak_memory_bytes: Count = 0
    num_steps: Count = 0
    calibration_s: float = 0.0
    step_s: float | None = None


class _Record(_Shape):
    """Of any run."""

    config: _Config = _Config()
    hashes: _Hashes = _Hashes(model="")
    provenance: _Source = _Source()
    accuracy: float | None = None
    accuracy_before: float | None = None
    held_out_loss: float | None = None
    held_out_loss_before: float | None = None
    cosine_P: float | None = None
    cosine_Q: float | None = None
    total_s: float | None = None


class _Tuned(_Record):
    """Of a run that trained."""

    config: _Config
    method: str
    trainable_parameters: Count
    adapter_bytes: Count | None = None
    calibration_s: float
    training_s: float
    peak_memory_bytes: Count
    training: _Training
    resources: _Resources = _Resources()


class _Failure(_Shape):
    reason: str
    message: str


def is_record(content: Any) -> bool:
    """Whether this is the record of a run."""
    if not isinstance(content, dict):
        return False
    only_tuned = _Tuned.model_fields.keys() - _Record.model_fields.keys()
    return _fits(_Record if only_tuned.isdisjoint(content) else _Tuned, content)


def is_failure(content: Any) -> bool:
    """Whether this says why a run has no record."""
    return _fits(_Failure, content)


def _fits(shape: type[_Shape], content: Any) -> bool:
    try:
        shape.model_validate(content)
    except ValidationError:
        return False
    return True
