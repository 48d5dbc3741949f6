"""A job: one run with all its inputs, and its id, their hash."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from frozencore.constructors import readers
from frozencore.errors import ConfigError, most_telling, own_refusal
from frozencore.files.fingerprint import fingerprint_options
from frozencore.tune.methods.bases_config import GROUPS
from frozencore.tune.rows.row_sources import STANDARD_INPUT
from frozencore.tune.run.config import RunConfig, in_groups
from frozencore.tune.suite import find_task
from frozencore_lab.campaign.kinds import StudyKind, find_kind
from frozencore_lab.campaign.study_options import PLACES

ID_DIGITS = 16
PAPERS_CORES = {"coordinates": "qr", "alpha": None}
"""The paper's values of core options; our defaults differ. An id leaves these values out, as it leaves out defaults."""


@dataclass(frozen=True)
class Job:
    """One run of a campaign; equal jobs of different studies are one job.

    Attributes:
        reference_size: Calibration examples of the reference, if the kind of study has one.
    """

    kind: StudyKind
    config: RunConfig
    reference_size: int | None = None

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The inputs of the run: options that are not at their defaults, and numbers from the task or method.

        A new option of a later version does not change it.
        """
        values = self.config.model_dump(mode="json", exclude={*PLACES, "core"}, exclude_defaults=True)
        if core := self._core_options():
            values["core"] = core
        values["learning_rate"] = self.config.resolved_learning_rate
        values["warmup"] = self.config.resolved_warmup
        if self.config.task is not None:
            task = find_task(self.config.task)
            protocol = {name: getattr(task, name) for name in ("epochs", "num_train", "num_evaluation")}
            values = protocol | values
        return {"kind": self.kind.name, "reference_size": self.reference_size, **values}

    def _core_options(self) -> dict[str, Any]:
        """The core options that the method reads and that belong to the id."""
        given = self.config.core.model_dump(mode="json")
        default = type(self.config.core)().model_dump(mode="json") | PAPERS_CORES
        changed = {name: value for name, value in given.items() if value != default[name]}
        return {name: value for name, value in changed.items() if self.config.method in readers(name)}

    @cached_property
    def id(self) -> str:
        """Hash of the resolved configuration, 16 hexadecimal digits."""
        return fingerprint_options(self.resolved)[:ID_DIGITS]


def make_job(kind: str, options: dict[str, Any], reference_size: int | None = None) -> Job:
    """Make a job from options of a run by name, including core options.

    Raises:
        ConfigError: An option is wrong; the message names it.
    """
    data = options.get("data") or ()
    sources = {data} if isinstance(data, str) else {*data}
    if STANDARD_INPUT in {*sources, options.get("eval_data")}:
        raise ConfigError("data: the standard input can be read once, but each run reads its rows. Give a file.")
    try:  # through JSON, in which a list may become a tuple and text never becomes a number
        config = RunConfig.model_validate_json(json.dumps(in_groups(options)), strict=True)
    except ValidationError as error:
        first = most_telling(error)
        if (refused := own_refusal(first)) is not None:
            raise refused from error
        name = next((str(part) for part in first["loc"] if part not in GROUPS), "a run")
        raise ConfigError(f"{name}: {first['msg'].lower()}, but {first['input']!r} came.") from error
    return Job(find_kind(kind), config, reference_size)
