"""The parts of a run's configuration: the base model, the rows, the method, the training and the scoring.

The names, types, defaults and descriptions of the fields are those of flags, YAML keys, the JSON schema and records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from frozencore.calibration.calibration_options import BATCH_SIZE
from frozencore.errors import ConfigError
from frozencore.options import Bounds, ConfigPart
from frozencore.tune.methods import SEED, Method, Seed
from frozencore.tune.rows.conversations import LossOn
from frozencore.tune.rows.prompts import PromptStyle, TooLong
from frozencore.tune.rows.row_sources import STANDARD_INPUT, in_words, sources_of
from frozencore.tune.rows.sources import TASK, is_named

PositiveInt = Annotated[int, Bounds(gt=0)]
SelectionMetric = Literal["accuracy", "held_out_loss"]
ScoredOn = Literal["evaluation", "validation"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigPart):
    """The base model."""

    name: Annotated[
        str,
        "Hub id, local folder or GGUF file of a causal language model. pocket: the model shipped with "
        "frozencore; smollm2: the model that `make smollm2` fetches.",
    ]
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], "Dtype of the base model's weights."] = "auto"
    device: Annotated[str, "auto, cpu, cuda, cuda:1, ..."] = "auto"


def _as_pathlib_spells(data: Any) -> Any:
    """Write each source as pathlib does; a list of one source becomes that source."""
    if isinstance(data, list | tuple):
        return _as_pathlib_spells(data[0]) if len(data) == 1 else tuple(map(_as_pathlib_spells, data))
    return str(Path(data)) if isinstance(data, str | Path) else data


@dataclass(frozen=True, kw_only=True)
class RowsConfig(ConfigPart):
    """The rows to learn, and their form as tokens."""

    data: Annotated[
        str | tuple[str, ...] | None,
        "Your own rows: a JSONL, JSON, CSV, TSV, Parquet or Arrow file (also .gz, .zst), a split of a "
        "data set on the hub or in a folder (OWNER/NAME:train), - (JSONL from a pipe), or a task of the lab "
        "(task:sst2). Columns: prompt and completion (with choices: scored by their likelihood), messages, "
        "instruction and output (Alpaca), conversations (ShareGPT), or text. May be repeated for several files.",
    ] = None
    data_root: Annotated[Path | None, "Folder that holds a task's data set under its hub id. Default: the hub."] = None
    columns: Annotated[str | None, "Names of your columns, such as prompt=question,completion=answer."] = None
    eval_data: Annotated[
        str | None,
        "Your own held-out rows, in the forms of the training rows, in place of a tenth of these. Training rows "
        "with the same text are left out.",
    ] = None
    max_length: Annotated[
        int | None, Bounds(ge=2), "The most tokens of a row. Default: 512, or the model's context if less."
    ] = None
    too_long: Annotated[
        TooLong,
        "Rows beyond --max-length. refuse: stop. cut: cut prompts at their beginning and texts without "
        "a prompt at their end, and leave out rows whose completion is too long. skip: leave them out.",
    ] = "refuse"
    skip_bad: Annotated[
        bool,
        "Leave out your rows with a missing or empty column; print their number and the reason.",
    ] = False
    num_train: Annotated[int | None, Bounds(ge=1), "Number of training rows. Default: the task's."] = None
    num_evaluation: Annotated[
        int | None,
        Bounds(ge=1),
        "Number of evaluation rows. Default: the task's; of your rows a tenth, at most 500.",
    ] = None
    paper_steps: Annotated[
        bool,
        "Train on all rows, as the paper's step counts imply: a task without validation rows holds out "
        "none, unless the run is scored on validation rows.",
    ] = False
    rows_by_seed: Annotated[
        bool,
        "Draw a task's training and evaluation rows by --seed, so that seeds differ in their rows too. "
        "Default: the same rows for every seed.",
    ] = False
    loss_on: Annotated[
        LossOn,
        "Turns of the assistant in a conversation that carry the loss: the last one, or all.",
    ] = "last"
    prompt_style: Annotated[PromptStyle, "How prompts are written."] = "auto"
    calibration_size: Annotated[
        int, Bounds(ge=1), "Training rows that the calibration pass reads; of several tenants, in all."
    ] = 128
    calibration_batch: Annotated[
        int, Bounds(ge=1), "Rows in one forward pass of the calibration; fewer take less memory."
    ] = BATCH_SIZE
    calibration_data: Annotated[
        str | None,
        "Rows to calibrate on, in the forms of the training rows. Default: these.",
    ] = None
    seed: Seed = SEED

    def __post_init__(self) -> None:
        for name in ("data", "eval_data", "calibration_data"):
            object.__setattr__(self, name, _as_pathlib_spells(getattr(self, name)))
        super().__post_init__()
        if self.calibration_data == self.data:  # the run has the id of the plain run
            object.__setattr__(self, "calibration_data", None)
        if self.data is None:
            raise ConfigError("A run learns rows: give --data FILE, or --data task:NAME for a task of the lab.")
        if [*self.sources, self.eval_data, self.calibration_data].count(STANDARD_INPUT) > 1:
            raise ConfigError("The standard input is one source of rows, but two options name it. Give one as a file.")
        if self.eval_data is not None and is_named(self.eval_data):
            raise ConfigError(
                f"--eval-data is for your own rows, but {self.eval_data} was given. "
                "`frozencore task NAME --out DIR` writes a task's rows as files."
            )
        if any(map(is_named, self.sources)):
            if len(self.sources) > 1:
                raise ConfigError(
                    f"A task has splits of its own and stands alone, but {self.learns} was given. Give one."
                )
            self.refuse_changed(
                ("eval_data", "loss_on", "columns", "skip_bad"),
                "{flag} is for your own rows (--data), but a task was given. Leave one out.",
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of rows."""
        return sources_of(self.data or ())

    @property
    def learns(self) -> str:
        """The sources of rows, in words."""
        return in_words(self.data)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(ConfigPart):
    """The recipe of the training."""

    learning_rate: Annotated[
        Literal["auto"] | Annotated[float, Bounds(gt=0)],
        "Peak learning rate. auto: measured on the training rows for cores, else the method's own.",
    ] = "auto"
    warmup: Annotated[
        float | None,
        Bounds(ge=0, le=1),
        "Share of the steps in which the learning rate rises. Default: the method's own.",
    ] = None
    epochs: Annotated[
        int | None,
        Bounds(ge=1),
        "Passes over the training rows. Default: the task's number; for your own rows enough for 32 "
        "steps, at most 8 passes.",
    ] = None
    batch_size: Annotated[Literal["auto"] | PositiveInt, "Rows in one forward pass. auto: as many rows as fit."] = (
        "auto"
    )
    accumulation: Annotated[
        int,
        Bounds(ge=1),
        "Forward passes in one optimizer step. With --batch-size auto: rows in one optimizer step, "
        "grouped by length if that is faster.",
    ] = 8
    save_steps: Annotated[
        int | None,
        Bounds(ge=1),
        "Optimizer steps between checkpoints. Default: a checkpoint after each epoch, and at Ctrl-C.",
    ] = None
    report_to: Annotated[
        tuple[Literal["tensorboard", "trackio", "wandb"], ...] | None,
        "Report losses and scores to tensorboard (in logs/), trackio or wandb.",
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


@dataclass(frozen=True, kw_only=True)
class ScoringConfig(ConfigPart):
    """The rows and metrics that score a run, and the choice of the step to keep."""

    select_checkpoint: Annotated[
        Literal["none", "epoch"] | PositiveInt,
        "Score validation rows and keep the best step. epoch: score after each epoch; a number: score "
        "after every so many steps; none: keep the last step, as does a run without validation rows.",
    ] = "none"
    select_by: Annotated[
        SelectionMetric,
        "How the best step is found: by accuracy (ties by held-out loss), or by held_out_loss.",
    ] = "accuracy"
    patience: Annotated[
        int | None,
        Bounds(ge=1),
        "End the training after so many scores of --select-checkpoint in a row without improvement. Default: never.",
    ] = None
    samples: Annotated[int, Bounds(ge=0), "Your held-out rows to complete before and after training."] = 3
    exact_match: Annotated[
        Literal["no", "yes", "auto"],
        "Generate the completions of your held-out rows and count those that are exactly right; "
        "auto: only if no completion is longer than 16 tokens.",
    ] = "auto"
    max_new_tokens: Annotated[
        int | None,
        Bounds(ge=1),
        "The most tokens of a generated answer. Default: the task's number, or the longest answer of your rows.",
    ] = None
    forgetting: Annotated[
        tuple[str, ...] | None,
        "Other tasks by name, to measure what the model forgets: the loss on the plain text of 32 "
        "evaluation rows of each task, before and after training.",
    ] = None
    evaluate_on: Annotated[
        ScoredOn,
        "Rows that give the score; validation: rows for choosing options, never among the evaluation rows.",
    ] = "evaluation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.forgetting is not None:
            tasks = (name if is_named(name) else f"{TASK}:{name}" for name in self.forgetting)
            object.__setattr__(self, "forgetting", tuple(tasks))
        if self.patience is not None and self.choose_every is None:
            raise ConfigError("--patience counts scores on validation rows: give --select-checkpoint epoch as well.")

    @property
    def choose_every(self) -> Literal["epoch"] | int | None:
        """Steps between two scores that choose the step to keep, or ``epoch``; None: the last step is kept."""
        return None if self.select_checkpoint == "none" else self.select_checkpoint

    @property
    def is_trial(self) -> bool:
        """Whether the run only helps to choose options: validation rows give its score."""
        return self.evaluate_on == "validation"
