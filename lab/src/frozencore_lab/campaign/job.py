"""A job: one run with all its inputs, and its id, their hash."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic_core import to_jsonable_python

from frozencore.constructors import readers
from frozencore.errors import ConfigError
from frozencore.files.fingerprint import fingerprint_options
from frozencore.tune.config import PLACES, RunConfig, core_options, make_config
from frozencore.tune.rows.row_sources import STANDARD_INPUT
from frozencore.tune.suite import find_task
from frozencore_lab.campaign.kinds import KINDS, StudyKind

ID_DIGITS = 16
PAPERS_CORES = {"coordinates": "qr", "alpha": None}
"""The paper's values of core options; our defaults differ. An id leaves these values out, as it leaves out defaults."""


@dataclass(frozen=True)
class Job:
    """One run of a campaign, and the reference's calibration examples if its kind has a reference."""

    kind: StudyKind
    config: RunConfig
    reference_size: int | None = None

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The inputs of the run: options that are not at their defaults, and numbers from the task or method.

        A new option of a later version does not change it.
        """
        given = self.config.content(changed=True)
        values = {name: value for name, value in given.items() if name not in (*PLACES, "core")}
        default = {name: option.default for name, option in core_options().items()} | PAPERS_CORES
        core = {
            name: to_jsonable_python(value)
            for name, value in self.config.method.core.items()
            if value != default[name] and self.config.method.name in readers(name)
        }
        values |= {"core": core} if core else {}
        values["learning_rate"] = self.config.resolved_learning_rate
        values["warmup"] = self.config.resolved_warmup
        if self.config.rows.task is not None:
            task = find_task(self.config.rows.task)
            protocol = {name: getattr(task, name) for name in ("epochs", "num_train", "num_evaluation")}
            values = protocol | values
        return {"kind": self.kind.name, "reference_size": self.reference_size, **values}

    @cached_property
    def id(self) -> str:
        """Hash of the resolved configuration, 16 hexadecimal digits."""
        return fingerprint_options(self.resolved)[:ID_DIGITS]


def make_job(kind: str, options: dict[str, Any], reference_size: int | None = None) -> Job:
    """Make a job from options of a run by name, including core options; a wrong option is a ``ConfigError``."""
    data = options.get("data") or ()
    sources = {data} if isinstance(data, str) else {*data}
    if STANDARD_INPUT in {*sources, options.get("eval_data")}:
        raise ConfigError("data: the standard input can be read once, but each run reads its rows. Give a file.")
    return Job(KINDS[kind], make_config(strict=True, **options), reference_size)
