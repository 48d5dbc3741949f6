"""One family of errors. Each message says the rule, what came, and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frozencore.words import one_line

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


class FrozenCoreError(Exception):
    """Whatever frozencore refuses. Its message is one line that shows every character of what it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(FrozenCoreError, ValueError):
    """An option is unknown, out of range, or contradicts another one."""


class CalibrationError(FrozenCoreError):
    """A calibration pass could not give the moments or the basis that was asked for."""


class DataError(FrozenCoreError, ValueError):
    """Rows are missing, malformed, unlabeled or too long."""


class NoRowsError(DataError):
    """The rows can be read, but none is left where one is needed."""


class ModelError(FrozenCoreError):
    """A model or tokenizer cannot be found, read, or adapted."""


class ArtifactError(FrozenCoreError):
    """A file of ours (moments, adapter, run) is damaged, stale, or made for something else."""


class TrainingError(FrozenCoreError):
    """Training diverged or cannot go on from what it found."""


class RankError(CalibrationError, TrainingError):
    """Another process of the same work failed, died or stopped answering."""


class DivergenceError(TrainingError):
    """A loss or a gradient is not a finite number any more."""


def own_refusal(error: ErrorDetails) -> ConfigError | None:
    """The error of ours that made pydantic refuse, where it was one."""
    refused = error.get("ctx", {}).get("error")
    return refused if isinstance(refused, ConfigError) else None


def most_telling(error: ValidationError) -> ErrorDetails:
    """The first error; for a value that fits none of several types, the error of the type that it nearly fits."""
    first, *others = error.errors()
    siblings = [first, *(other for other in others if other["loc"][:-1] == first["loc"][:-1])]
    return next((one for one in siblings if not one["type"].endswith("_type")), first)
