"""The full configuration of one run: which model learns what, how, and from which seed."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from frozencore.calibration.budget import memory_bytes
from frozencore.calibration.options import CalibrationOptions, FisherLabels, Tokens, Weighting
from frozencore.constructors import CONSTRUCTORS
from frozencore.constructors.eva import EvaOutput
from frozencore.errors import ConfigError
from frozencore.lab.methods import AdapterOptions, Method, Targets, find_method
from frozencore.lab.rows.prompt_date import PROMPT_DATE
from frozencore.lab.rows.prompts import PromptStyle
from frozencore.lab.rows.suite import find_task
from frozencore.maths.basis import Coordinates
from frozencore.maths.linalg import SvdMethod
from frozencore.maths.moments import MomentName
from frozencore.maths.whitening import Fisher, Sides

Measure = Literal["accuracy", "held_out_loss"]
READ_BY = {
    "whiten": ("fcca",), "fisher": ("fcca",), "shrinkage": ("fcca",), "damping": ("fcca",),
    "filora_fisher": ("filora",), "eva_center": ("eva",), "eva_output": ("eva",), "initial_step": ("signgrad",),
}  # fmt: skip
"""Which constructors read an option of the cores; the others are read by all."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CoreOptions(_Strict):
    """Options of the frozen cores, named as in :class:`frozencore.FrozenCoreConfig`; LoRA and its kin ignore them."""

    alpha: float | None = None
    whiten: Sides = "both"
    fisher: Fisher = "diagonal"
    shrinkage: float = Field(default=0.0, ge=0, le=1)
    damping: float = Field(default=1e-3, gt=0)
    coordinates: Coordinates = "qr"
    svd_method: SvdMethod = "auto"
    filora_fisher: Fisher = "dense"
    eva_center: bool = False
    eva_output: EvaOutput = "weight_times_input"
    initial_step: float = 0.0


class PassOptions(_Strict):
    """Options of the calibration pass, named as in :class:`frozencore.calibration.options.CalibrationOptions`."""

    tokens: Tokens = "nonpad"
    skip_first: int = Field(default=0, ge=0)
    weighting: Weighting = "example_mean"
    fisher_labels: FisherLabels = "empirical"

    @field_validator("weighting")
    @classmethod
    def _by_its_full_name(cls, weighting: Weighting) -> Weighting:
        """A run has one id, whichever name was written."""
        return CalibrationOptions(weighting=weighting).weighting


class RunConfig(_Strict):
    """One run of the training recipe (paper, section 4 and appendix B).

    Attributes:
        model: Hub id or local folder of a causal language model; ``pocket`` is the one shipped here.
        task, data: A task by name, or a file of the user's own rows; exactly one of them.
        data_root: Folder that holds the task's data set under its hub id; the hub otherwise.
        method: A name of :data:`frozencore.lab.methods.METHODS`.
        memory_budget: What calibration may take beyond a forward and backward pass, ``"8GiB"`` for instance.
        calibration_task: Task that the calibration rows are of, where it is not the one to learn; the latter's own
            name is the same as None.
        targets: Module names or ``"all-linear"``; None is the model's attention projections.
        learning_rate, warmup: None are those of the method's row.
        epochs: None is the task's number, or 1 for own data.
        max_length: Tokens of a row; None is 512 or the model's context, whichever is less.
        prompt_date: Today, to a chat template that asks for it.
        evaluate_on: ``validation`` scores on the held-out validation rows instead, to choose options with.
        paper_steps: A run that is evaluated trains on all rows even where none are left for validation, as the paper's
            step counts imply; one that is scored on validation rows has them held out as ever.
        select_checkpoint: When validation rows are scored (``epoch``, or steps between two scores), of which the best
            step's values are kept; ``none`` keeps the last step's, as does a run without validation rows.
        select_by: What a step must have most of (accuracy; ties go to the lower held-out loss) or least of (loss, which
            also decides where the task has no accuracy).
        num_train, num_evaluation: None are the task's sizes; own data holds out a tenth, at most 500 rows.
    """

    model: str
    task: str | None = None
    data: Path | None = None
    data_root: Path | None = None
    method: str = "fcca"
    rank: int = Field(default=16, ge=1)
    targets: Targets | None = None
    core: CoreOptions = CoreOptions()
    calibration: PassOptions = PassOptions()
    calibration_size: int = Field(default=128, ge=1)
    memory_budget: str | None = None
    calibration_task: str | None = None
    learning_rate: float | None = Field(default=None, gt=0)
    warmup: float | None = Field(default=None, ge=0, le=1)
    epochs: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=1, ge=1)
    accumulation: int = Field(default=8, ge=1)
    seed: int = Field(default=42, ge=0, lt=2**32)
    max_length: int | None = Field(default=None, ge=2)
    truncate: bool = False
    prompt_style: PromptStyle = "auto"
    prompt_date: date = PROMPT_DATE
    evaluate_on: Literal["evaluation", "validation"] = "evaluation"
    num_train: int | None = Field(default=None, ge=1)
    num_evaluation: int | None = Field(default=None, ge=1)
    paper_steps: bool = False
    select_checkpoint: Literal["none", "epoch"] | PositiveInt = "none"
    select_by: Measure = "accuracy"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"

    @field_validator("calibration_task")
    @classmethod
    def _is_another(cls, name: str | None, before: ValidationInfo) -> str | None:
        """A task calibrated on itself is the plain run, of the same id."""
        return None if name == before.data.get("task") else name

    @field_validator("select_checkpoint", mode="before")
    @classmethod
    def _is_a_choice(cls, came: Any) -> Any:
        if came not in ("none", "epoch") and (type(came) is not int or came < 1):
            raise ConfigError(
                f"select_checkpoint is none, epoch, or a number of steps from 1 up, but {came!r:.50} came."
            )
        return came

    @model_validator(mode="after")
    def _names_are_known(self) -> RunConfig:
        if (self.task is None) == (self.data is None):
            raise ConfigError("A run learns either a task (--task NAME) or your own rows (--data FILE): give one.")
        if self.task is not None:
            find_task(self.task)
        if self.calibration_task is not None:
            find_task(self.calibration_task)
        if self.memory_budget is not None:
            memory_bytes(self.memory_budget)
        find_method(self.method)
        for option in self.core.model_dump(exclude_defaults=True):
            readers = READ_BY.get(option, tuple(CONSTRUCTORS))
            if self.method not in readers:
                raise ConfigError(
                    f"The method {self.method!r} does not read {option} (it is for {', '.join(readers)}). Leave it out."
                )
        return self

    @property
    def calibration_options(self) -> CalibrationOptions:
        """The options of the calibration pass; sampled labels are the run's own."""
        return CalibrationOptions(**self.calibration.model_dump(), seed=self.seed, memory_budget=self.memory_budget)

    @property
    def method_entry(self) -> Method:
        """The row of the method table."""
        return find_method(self.method)

    @property
    def moments_needed(self) -> frozenset[MomentName]:
        """What the method reads of the calibration data; nothing for one that needs none."""
        return self.method_entry.needs(self.adapter_options(()))

    @property
    def resolved_learning_rate(self) -> float:
        return self.method_entry.learning_rate if self.learning_rate is None else self.learning_rate

    @property
    def resolved_warmup(self) -> float:
        return self.method_entry.warmup if self.warmup is None else self.warmup

    def adapter_options(self, targets: Targets) -> AdapterOptions:
        """What the method builds its adapter by, on the layers that the model turned out to have."""
        return AdapterOptions(self.rank, targets, self.seed, self.core.model_dump())


def make_config(**values: Any) -> RunConfig:
    """A checked configuration.

    Raises:
        ConfigError: In one line, what is wrong with which option.
    """
    try:
        return RunConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        refused = first.get("ctx", {}).get("error")
        if isinstance(refused, ConfigError):
            raise refused from error
        place = [part for part in first["loc"] if part not in ("core", "calibration")] or first["loc"]
        option = "--" + " ".join(str(place[0]).replace("_", "-").split())
        raise ConfigError(f"{option}: {first['msg'].lower()}, but {first['input']!r:.200} came.") from error
