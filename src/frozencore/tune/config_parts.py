"""The parts of a run's configuration: the base model, the rows, the method, the training and the scoring.

The names, types, defaults and descriptions of the fields are those of flags, YAML keys, the JSON schema and records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.constructors import BasisOptions, check_unused_options, constructor_options
from frozencore.constructors.constructor import Rank, ScaleOptions
from frozencore.errors import ConfigError, wrapped_error
from frozencore.maths.moments import MomentName
from frozencore.maths.quantise import Bits
from frozencore.options import Option, options_of
from frozencore.text import flag_of, unknown_name
from frozencore.tune.methods import AdapterOptions, Method, Targets, find_method
from frozencore.tune.rows.prompts import LossOn, PromptStyle, TooLong
from frozencore.tune.rows.row_sources import in_words, sources_of
from frozencore.tune.rows.sources import TASK, is_named

SEED = 42
Seed = Annotated[int, Field(ge=0, lt=2**32, description="Seed of calibration rows, row order and random directions.")]
SelectionMetric = Literal["accuracy", "held_out_loss"]
ScoredOn = Literal["evaluation", "validation"]


class ConfigPart(BaseModel):
    """Options that are checked once and do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def refuse_changed(self, names: tuple[str, ...], why: str) -> None:
        """Raise a ``ConfigError`` for the first of these options that is not at its default."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(why.format(name=name, flag=flag_of(name)))


class ModelConfig(ConfigPart):
    """The base model."""

    name: Annotated[
        str,
        Field(
            description="Hub id, local folder or GGUF file of a causal language model. pocket: the model shipped with "
            "frozencore; smollm2: the model that `make smollm2` fetches."
        ),
    ]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Field(description="Dtype of the base model's weights.")
    ] = "auto"
    device: Annotated[str, Field(description="auto, cpu, cuda, cuda:1, ...")] = "auto"


def _as_pathlib_spells(data: Any) -> Any:
    """Write each source as pathlib does; a list of one source becomes that source."""
    if isinstance(data, list | tuple):
        return _as_pathlib_spells(data[0]) if len(data) == 1 else tuple(map(_as_pathlib_spells, data))
    return str(Path(data)) if isinstance(data, str | Path) else data


def _as_task(name: Any) -> Any:
    return f"{TASK}:{name}" if isinstance(name, str) and not is_named(name) else name


class RowsConfig(ConfigPart):
    """The rows to learn, and their form as tokens."""

    data: Annotated[
        str | tuple[str, ...] | None,
        BeforeValidator(_as_pathlib_spells),
        Field(
            description="Your own rows: a JSONL, JSON, CSV, TSV, Parquet or Arrow file (also .gz, .zst), a split of a "
            "data set on the hub or in a folder (OWNER/NAME:train), - (JSONL from a pipe), or a task of the lab "
            "(task:sst2). Columns: prompt and completion (with choices: scored by their likelihood), messages, "
            "instruction and output (Alpaca), conversations (ShareGPT), or text. May be repeated for several files."
        ),
    ] = None
    data_root: Annotated[
        Path | None, Field(description="Folder that holds a task's data set under its hub id. Default: the hub.")
    ] = None
    columns: Annotated[
        str | None, Field(description="Names of the columns of --data, such as prompt=question,completion=answer.")
    ] = None
    eval_data: Annotated[
        str | None,
        BeforeValidator(_as_pathlib_spells),
        Field(
            description="Your own held-out rows, in the forms of --data, in place of a tenth of --data. Rows of --data "
            "with the same text are not trained on."
        ),
    ] = None
    max_length: Annotated[
        int | None, Field(ge=2, description="The most tokens of a row. Default: 512, or the model's context if less.")
    ] = None
    too_long: Annotated[
        TooLong,
        Field(
            description="Rows beyond --max-length. refuse: stop. cut: cut prompts at their beginning and texts without "
            "a prompt at their end, and leave out rows whose completion is too long. skip: leave them out."
        ),
    ] = "refuse"
    skip_bad: Annotated[
        bool,
        Field(
            description="Leave out rows of --data with a missing or empty column; print their number and the reason."
        ),
    ] = False
    num_train: Annotated[int | None, Field(ge=1, description="Number of training rows. Default: the task's.")] = None
    num_evaluation: Annotated[
        int | None,
        Field(ge=1, description="Number of evaluation rows. Default: the task's; for --data a tenth, at most 500."),
    ] = None
    paper_steps: Annotated[
        bool,
        Field(
            description="Train on all rows, as the paper's step counts imply: a task without validation rows holds out "
            "none, unless the run is scored on validation rows."
        ),
    ] = False
    rows_by_seed: Annotated[
        bool,
        Field(
            description="Draw a task's training and evaluation rows by --seed, so that seeds differ in their rows too. "
            "Default: the same rows for every seed."
        ),
    ] = False
    loss_on: Annotated[
        LossOn,
        Field(description="Turns of the assistant in a conversation that carry the loss: the last one, or all."),
    ] = "last"
    prompt_style: Annotated[PromptStyle, Field(description="How prompts are written.")] = "auto"
    calibration_size: Annotated[
        int, Field(ge=1, description="Training rows that the calibration pass reads; of several tenants, in all.")
    ] = 128
    calibration_data: Annotated[
        str | None,
        BeforeValidator(_as_pathlib_spells),
        Field(description="Rows to calibrate on, in the forms of --data. Default: the training rows."),
    ] = None
    seed: Seed = SEED

    @field_validator("calibration_data")
    @classmethod
    def _is_another(cls, given: str | None, before: ValidationInfo) -> str | None:
        """Drop calibration rows that are the training rows, so that the run has the same id as the plain run."""
        return None if given == before.data.get("data") else given

    @model_validator(mode="after")
    def _has_a_source(self) -> RowsConfig:
        if self.data is None:
            raise ConfigError("A run learns rows: give --data FILE, or --data task:NAME for a task of the lab.")
        if self.eval_data is not None and is_named(self.eval_data):
            raise ConfigError(
                f"--eval-data is for your own rows, but {self.eval_data} came. `frozencore task NAME --out DIR` writes "
                "a task's rows as files."
            )
        if any(map(is_named, self.sources)):
            if len(self.sources) > 1:
                raise ConfigError(f"A task has splits of its own and stands alone, but {self.learns} came. Give one.")
            self.refuse_changed(
                ("eval_data", "loss_on", "columns", "skip_bad"),
                "{flag} is for your own rows (--data), but a task came. Leave one out.",
            )
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of rows."""
        return sources_of(self.data or ())

    @property
    def learns(self) -> str:
        """The sources of rows, in words."""
        return in_words(self.data)


def core_options() -> dict[str, Option]:
    """The options of cores and bases by name, of all constructors in the current table."""
    return {**options_of(ScaleOptions), **constructor_options()}


def _read_core(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the given options of the constructors."""
    found, known = {}, core_options()
    for name, value in given.items():
        if name not in known:
            raise ConfigError(unknown_name("option", name, known))
        option = known[name]
        try:  # through JSON, in which a list may become a tuple and text never becomes a number
            found[name] = option.adapter.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            raise wrapped_error(error.errors()[0]) or ConfigError(
                f"{name} must be {option.rule}, but {value!r:.200} came."
            ) from error
    return found


class MethodConfig(ConfigPart):
    """What is trained: the method, its layers, its bases and their calibration.

    Attributes:
        core: The given options of cores and constructors, by name.
    """

    name: Annotated[str, Field(description="What to train.")] = "fcca"
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
    start_from: Annotated[
        str | None,
        Field(
            description="Start from the core of an adapter on --basis: its folder, or that of its run; merge makes the "
            "mean of several. Default: zero."
        ),
    ] = None
    bits: Bits = 32
    core: Annotated[dict[str, Any], BeforeValidator(_read_core)] = {}
    calibration: CalibrationOptions = CalibrationOptions()
    seed: Seed = SEED

    @model_validator(mode="after")
    def _fits_together(self) -> MethodConfig:
        self.refuse_changed(self.entry.unread, f"The method {self.name!r} does not read {{name}}. Leave {{flag}} out.")
        defaults = core_options()
        check_unused_options(self.name, {name: v for name, v in self.core.items() if v != defaults[name].default})
        if self.basis is not None and self.layers is not None:
            raise ConfigError("A saved basis has its own layers: leave --layers out.")
        if self.start_from is not None and self.basis is None:
            raise ConfigError("--start-from takes a core on a saved basis: name that basis with --basis.")
        return self

    @property
    def entry(self) -> Method:
        """The method's row in the table of methods."""
        return find_method(self.name)

    @property
    def moments_needed(self) -> frozenset[MomentName]:
        """The moments that the method needs; empty for a method without calibration."""
        return self.entry.needs(self.adapter_options(()))

    def adapter_options(self, targets: Targets) -> AdapterOptions:
        """The method's options for its adapter, on the model's actual layers."""
        return AdapterOptions(self.rank, targets, self.seed, self.core, self.basis)


class TrainingConfig(ConfigPart):
    """The recipe of the training."""

    learning_rate: Annotated[
        Literal["auto"] | Annotated[float, Field(gt=0)],
        Field(description="Peak learning rate. auto: measured on the training rows for cores, else the method's own."),
    ] = "auto"
    warmup: Annotated[
        float | None,
        Field(
            ge=0, le=1, description="Share of the steps in which the learning rate rises. Default: the method's own."
        ),
    ] = None
    epochs: Annotated[
        int | None,
        Field(
            ge=1,
            description="Passes over the training rows. Default: the task's number; for your own rows enough for 32 "
            "steps, at most 8 passes.",
        ),
    ] = None
    batch_size: Annotated[
        Literal["auto"] | PositiveInt, Field(description="Rows in one forward pass. auto: as many rows as fit.")
    ] = "auto"
    accumulation: Annotated[
        int,
        Field(
            ge=1,
            description="Forward passes in one optimizer step. With --batch-size auto: rows in one optimizer step, "
            "grouped by length if that is faster.",
        ),
    ] = 8
    save_steps: Annotated[
        int | None,
        Field(
            ge=1,
            description="Optimizer steps between checkpoints. Default: a checkpoint after each epoch, and at Ctrl-C.",
        ),
    ] = None
    report_to: Annotated[
        tuple[Literal["tensorboard", "trackio", "wandb"], ...] | None,
        Field(description="Report losses and scores to tensorboard (in logs/), trackio or wandb."),
    ] = None
    seed: Seed = SEED

    def rate_of(self, method: Method) -> float | None:
        """The learning rate, by default the method's; None if it is to be measured."""
        return method.learning_rate if self.learning_rate == "auto" else self.learning_rate

    def warmup_of(self, method: Method) -> float:
        """The share of steps that warm up, by default the method's."""
        return method.warmup if self.warmup is None else self.warmup

    @property
    def effective_batch_size(self) -> int:
        """Training rows of one optimizer step, for any batch size."""
        return self.accumulation * (1 if self.batch_size == "auto" else self.batch_size)


class ScoringConfig(ConfigPart):
    """The rows and metrics that score a run, and the choice of the step to keep."""

    select_checkpoint: Annotated[
        Literal["none", "epoch"] | PositiveInt,
        Field(
            description="Score validation rows and keep the best step. epoch: score after each epoch; a number: score "
            "after every so many steps; none: keep the last step, as does a run without validation rows."
        ),
    ] = "none"
    select_by: Annotated[
        SelectionMetric,
        Field(description="How the best step is found: by accuracy (ties by held-out loss), or by held_out_loss."),
    ] = "accuracy"
    patience: Annotated[
        int | None,
        Field(
            ge=1,
            description="End the training after so many scores of --select-checkpoint in a row without improvement. "
            "Default: never.",
        ),
    ] = None
    samples: Annotated[
        int, Field(ge=0, description="Held-out rows of --data to complete before and after training.")
    ] = 3
    exact_match: Annotated[
        Literal["no", "yes", "auto"],
        Field(
            description="Generate the completions of held-out rows of --data and count those that are exactly right; "
            "auto: only if no completion is longer than 16 tokens."
        ),
    ] = "auto"
    max_new_tokens: Annotated[
        int | None, Field(ge=1, description="The most tokens of a generated answer. Default: the task's number.")
    ] = None
    forgetting: Annotated[
        tuple[Annotated[str, BeforeValidator(_as_task)], ...] | None,
        Field(
            description="Other tasks by name, to measure what the model forgets: the loss on the plain text of 32 "
            "evaluation rows of each task, before and after training."
        ),
    ] = None
    evaluate_on: Annotated[
        ScoredOn,
        Field(
            description="Rows that give the score; validation: rows for choosing options, never among the evaluation "
            "rows."
        ),
    ] = "evaluation"

    @field_validator("select_checkpoint", mode="before")
    @classmethod
    def _is_a_choice(cls, came: Any) -> Any:
        if came not in ("none", "epoch") and (type(came) is not int or came < 1):
            raise ConfigError(
                f"select_checkpoint is none, epoch, or a number of steps from 1 up, but {came!r:.50} came."
            )
        return came

    @model_validator(mode="after")
    def _fits_together(self) -> ScoringConfig:
        if self.patience is not None and self.select_checkpoint == "none":
            raise ConfigError("--patience counts scores on validation rows: give --select-checkpoint epoch as well.")
        return self
