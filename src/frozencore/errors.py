"""The errors of frozencore. Each message has the rule, the value that broke it, and the way out."""

from __future__ import annotations

from frozencore.text import one_line

LAB_MISSING = "this needs the lab. Install it: pip install frozencore-lab, or pip install ./lab in the repository."


class FrozenCoreError(Exception):
    """Base class of all errors. The message is one line, and invisible characters are escaped."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ConfigError(FrozenCoreError, ValueError):
    """An option is unknown, out of range, or contradicts another one."""


class CalibrationError(FrozenCoreError):
    """A calibration pass could not compute the requested moments or basis."""


class DataError(FrozenCoreError, ValueError):
    """Rows are missing, malformed, unlabeled or too long."""


class NoRowsError(DataError):
    """The rows can be read, but no row is left for some required purpose."""


class ModelError(FrozenCoreError):
    """A model or tokenizer cannot be found, read, or adapted."""


class ArtifactError(FrozenCoreError):
    """A file of frozencore (moments, adapter, run) is damaged, outdated, or made for something else."""


class TrainingError(FrozenCoreError):
    """Training diverged or cannot be resumed."""


class RankError(CalibrationError, TrainingError):
    """Another process of the same run failed, died or stopped answering."""


class DivergenceError(TrainingError):
    """A loss or a gradient is not finite."""
