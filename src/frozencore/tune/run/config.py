"""The full configuration of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from frozencore.calibration.calibration_options import CalibrationOptions, MemoryBudget
from frozencore.errors import ConfigError, own_refusal
from frozencore.maths.moments import MomentName
from frozencore.options import FrozenOptions, Option
from frozencore.tune.methods import AdapterOptions, Targets
from frozencore.tune.methods.bases_config import GROUPS, BasesConfig, read_group
from frozencore.tune.rows.rows_config import RowsConfig
from frozencore.tune.scoring.scoring_config import ScoringConfig
from frozencore.tune.suite import find_task
from frozencore.tune.training.recipe_config import AloneConfig, RecipeConfig
from frozencore.words import flag_of, one_line


class PlaceConfig(FrozenOptions):
    """Options of the machine; they do not change the results."""

    data_root: Annotated[
        Path | None, Field(description="Folder that holds the task's data set under its hub id. Default: the hub.")
    ] = None
    device: Annotated[str, Field(description="auto, cpu, cuda, cuda:1, ...")] = "auto"


class CalibrationConfig(FrozenOptions):
    """Options of the calibration data."""

    calibration: Annotated[SerializeAsAny[BaseModel], BeforeValidator(partial(read_group, group="calibration"))] = (
        Field(default_factory=partial(read_group, {}, "calibration"))
    )
    calibration_size: Annotated[
        int, Field(ge=1, description="Training rows that the calibration pass reads, of each tenant.")
    ] = 128
    memory_budget: MemoryBudget = None
    calibration_task: Annotated[
        str | None, Field(description="Task of the calibration rows. Default: the task to learn.")
    ] = None


class RunConfig(PlaceConfig, ScoringConfig, RecipeConfig, CalibrationConfig, BasesConfig, RowsConfig):
    """One run of the training recipe (paper, section 4 and appendix B).

    It joins six parts, each defined beside the code that reads it. Option names are flat, in files and records too.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle through JSON, because each process makes the types of the option groups itself."""
        return RunConfig.model_validate_json, (self.model_dump_json(),)

    @field_validator("calibration_task")
    @classmethod
    def _is_another(cls, given: str | None, before: ValidationInfo) -> str | None:
        """Drop a calibration task equal to the task, so that the run has the same id as the plain run."""
        return None if given == before.data.get("task") else given

    @model_validator(mode="after")
    def _parts_go_together(self) -> RunConfig:
        for name in (self.task, self.calibration_task, *(self.forgetting or ())):
            if name is not None:
                find_task(name)
        if self.task in (self.forgetting or ()):
            raise ConfigError(
                f"--forgetting is about other tasks, but the run learns {self.task!r}. Leave it out there."
            )
        for name in self.given(self.method_entry.unread):
            raise ConfigError(f"The method {self.method!r} does not read {name}. Leave {flag_of(name)} out.")
        if self.patience is not None and self.select_checkpoint == "none":
            raise ConfigError("--patience counts scores on validation rows: give --select-checkpoint epoch as well.")
        return self

    def refuse_alone(self) -> None:
        """Refuse options that tenants, which train side by side, cannot have.

        Raises:
            ConfigError: Such an option was given; the message names the first one.
        """
        for name in self.given(AloneConfig.model_fields):
            raise ConfigError(
                f"{flag_of(name)} is for a run that trains alone, but tenants train side by side, on one basis and in "
                "common batches. Leave one out."
            )

    @property
    def calibration_options(self) -> CalibrationOptions:
        """The options of the calibration pass."""
        return CalibrationOptions(**self.calibration.model_dump(), memory_budget=self.memory_budget)

    @property
    def moments_needed(self) -> frozenset[MomentName]:
        """The moments that the method needs; empty for a method without calibration."""
        return self.method_entry.needs(self.adapter_options(()))

    @property
    def resolved_learning_rate(self) -> float:
        return self.method_entry.learning_rate if self.learning_rate is None else self.learning_rate

    @property
    def resolved_warmup(self) -> float:
        return self.method_entry.warmup if self.warmup is None else self.warmup

    def adapter_options(self, targets: Targets) -> AdapterOptions:
        """The method's options for its adapter, on the model's actual layers."""
        return AdapterOptions(self.rank, targets, self.seed, self.core.model_dump(), self.basis)


def make_config(**values: Any) -> RunConfig:
    """Make a checked configuration.

    Raises:
        ConfigError: An option is wrong; the message names it.
    """
    try:
        return RunConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        if (refused := own_refusal(first)) is not None:
            raise refused from error
        place = [part for part in first["loc"] if part not in GROUPS] or first["loc"]
        option = one_line(flag_of(str(place[0])))
        raise ConfigError(f"{option}: {first['msg'].lower()}, but {first['input']!r:.200} came.") from error


def run_options() -> dict[str, Option]:
    """Every option of a run by name, including those of the groups."""
    full, plain = _types_of_options()
    found: dict[str, Option] = {}
    for name, field in RunConfig.model_fields.items():
        default = MISSING if field.is_required() else field.get_default()
        own = GROUPS[name]() if name in GROUPS else {name: Option(name, full[name], plain[name], default)}
        if twice := found.keys() & own.keys():
            raise ConfigError(f"An option has one meaning, but {min(twice)!r} has two. Rename that of the constructor.")
        found |= own
    return found


@cache  # evaluation is the slowest part of reading a campaign's specification
def _types_of_options() -> tuple[dict[str, Any], dict[str, Any]]:
    """The options' types, annotated and plain."""
    return get_type_hints(RunConfig, include_extras=True), get_type_hints(RunConfig)


def in_groups(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arrange options by name as the configuration holds them, some of them in a group."""
    values = dict(options)
    for group, own in GROUPS.items():
        values[group] = {name: values.pop(name) for name in own() if name in values}
    return values
