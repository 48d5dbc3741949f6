"""The full configuration of one run: which model learns what, how, and from which seed."""

from __future__ import annotations

from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from frozencore.calibration.options import CalibrationOptions, MemoryBudget, RefreshMemory
from frozencore.constructors import BasisOptions
from frozencore.constructors.options import Rank, RankBudget
from frozencore.errors import ConfigError
from frozencore.maths.moments import MomentName
from frozencore.options import own_refusal
from frozencore.privacy import CLIP, PrivateBudget
from frozencore.tune.methods import AdapterOptions, Method, Targets, find_method
from frozencore.tune.rows.prompt_date import PROMPT_DATE
from frozencore.tune.rows.prompts import PromptStyle
from frozencore.tune.run.config_rules import refuse_contradictions
from frozencore.tune.run.option_groups import GROUPS, Frozen, read_group
from frozencore.words import flag_of, one_line

SelectionMetric = Literal["accuracy", "held_out_loss"]


def _as_pathlib_spells(data: Any) -> Any:
    return str(Path(data)) if isinstance(data, str | Path) else data


class RunConfig(Frozen):
    """One run of the training recipe (paper, section 4 and appendix B); each field says what it is in its help."""

    model: Annotated[
        str,
        Field(
            description="Hub id, local folder or GGUF file of a causal language model; pocket is the one shipped here, "
            "smollm2 the one that `make smollm2` fetches."
        ),
    ]
    task: Annotated[str | None, Field(description="A task by name, for instance svamp or sst2.")] = None
    data: Annotated[
        str | None,
        BeforeValidator(_as_pathlib_spells),
        Field(
            description="Your own rows, JSONL, JSON, CSV, TSV, Parquet or Arrow, a split of a data set on the hub or "
            "in a folder (OWNER/NAME:train), or - (JSONL from a pipe): prompt and completion, messages, instruction "
            "and output (Alpaca), conversations (ShareGPT), or text."
        ),
    ] = None
    columns: Annotated[
        str | None, Field(description="Which column of --data is which: prompt=question,completion=answer.")
    ] = None
    data_root: Annotated[
        Path | None, Field(description="Folder that holds the task's data set under its hub id. Default: the hub.")
    ] = None
    method: Annotated[str, Field(description="What to train.")] = "fcca"
    rank: Rank = BasisOptions.rank
    rank_budget: RankBudget = None
    targets: Annotated[
        Targets | None,
        Field(description="Layer names, or all-linear. Default: the attention projections; with full, every weight."),
    ] = None
    layers: Annotated[
        int | None, Field(ge=1, description="Adapt the targets in that many last blocks alone. Default: in all.")
    ] = None
    basis: Annotated[
        str | None,
        Field(
            description="Train on a saved basis instead of choosing one: its folder or hub id. Method, rank, targets "
            "and scale are its own, and the adapter is saved as cores alone."
        ),
    ] = None
    core: Annotated[SerializeAsAny[BaseModel], BeforeValidator(partial(read_group, group="core"))] = Field(
        default_factory=partial(read_group, {}, "core")
    )
    calibration: Annotated[SerializeAsAny[BaseModel], BeforeValidator(partial(read_group, group="calibration"))] = (
        Field(default_factory=partial(read_group, {}, "calibration"))
    )
    calibration_size: Annotated[int, Field(ge=1, description="Training rows that the calibration pass reads.")] = 128
    memory_budget: MemoryBudget = None
    calibration_task: Annotated[
        str | None, Field(description="Task that the calibration rows are of. Default: the one to learn.")
    ] = None
    learning_rate: Annotated[
        float | None, Field(gt=0, description="The peak. Default: the method's own, 1e-2 for cores.")
    ] = None
    warmup: Annotated[
        float | None,
        Field(ge=0, le=1, description="Share of the steps in which the rate rises. Default: the method's own."),
    ] = None
    epochs: Annotated[
        int | None,
        Field(ge=1, description="Default: the task's number; of own data 1, up to 8 where the rows are few."),
    ] = None
    batch_size: Annotated[
        Literal["auto"] | PositiveInt,
        Field(
            description="Rows in one forward pass; auto: as many as fit of the rows of an optimiser step, whose number "
            "--accumulation then is, in groups of similar length where that pays."
        ),
    ] = 1
    accumulation: Annotated[int, Field(ge=1, description="Forward passes in one optimiser step.")] = 8
    padding_free: Annotated[
        bool,
        Field(
            description="Lay the rows of a forward pass end to end in one, apart from one another, instead of padding "
            "them. Pays with attention kernels that know the rows' lengths, and for few short rows."
        ),
    ] = False
    save_steps: Annotated[
        int | None,
        Field(ge=1, description="Optimiser steps between checkpoints. Default: one an epoch, and one at Ctrl-C."),
    ] = None
    refresh: Annotated[
        PositiveInt | Literal["auto"],
        Field(
            description="Train in that many rounds, each on new bases from the moments of the batches so far; the "
            "rounds' cores add up (LoRA: each on new factors). 1: on the first bases to the end. auto: one for each "
            "hundred rows that are trained on and each forty that are summed, of six steps at least, and at most "
            "sixteen.",
        ),
    ] = 1
    refresh_cost: Annotated[
        float | None,
        Field(
            gt=0,
            description="Of the products of the training, how many the moments of refresh may add: it decides how many "
            "steps they are of. Default: 0.09; 0.5 is every step.",
        ),
    ] = None
    refresh_memory: RefreshMemory = None
    private_epsilon: Annotated[
        float | None,
        Field(
            gt=0,
            description="Train within this privacy budget, which bounds what the cores say of any one row. Usual: 1 "
            "to 8; with --private-delta.",
        ),
    ] = None
    private_delta: Annotated[
        float | None,
        Field(gt=0, lt=1, description="The chance that the bound may fail; below one in the training rows, 1e-5."),
    ] = None
    private_clip: Annotated[
        float | None, Field(gt=0, description=f"The longest gradient that a row may add to a step. Default: {CLIP:g}.")
    ] = None
    seed: Annotated[
        int, Field(ge=0, lt=2**32, description="Of calibration rows, row order, drawn labels and random directions.")
    ] = 42
    max_length: Annotated[
        int | None, Field(ge=2, description="Tokens of a row. Default: 512, or the model's context if less.")
    ] = None
    truncate: Annotated[
        bool,
        Field(
            description="Cut long prompts at their beginning (texts without a prompt at their end) instead of refusing."
        ),
    ] = False
    skip_long: Annotated[
        bool,
        Field(description="Leave out and count rows that are too long; with --truncate, those whose completion is."),
    ] = False
    skip_bad: Annotated[
        bool,
        Field(description="Leave out and count rows of --data that lack a column or hold nothing in it, and say why."),
    ] = False
    packing: Annotated[
        bool,
        Field(
            description="Concatenate texts, each with its end token, to rows of --max-length tokens; attention runs "
            "across, and a text may go on in the next row."
        ),
    ] = False
    prompt_style: Annotated[PromptStyle, Field(description="How a task's prompts are written.")] = "auto"
    prompt_date: Annotated[date, Field(description="Today, to a chat template that asks for it.")] = PROMPT_DATE
    evaluate_on: Annotated[
        Literal["evaluation", "validation"],
        Field(description="Rows to score on; validation: rows to choose options with, never evaluated."),
    ] = "evaluation"
    num_train: Annotated[int | None, Field(ge=1, description="Training rows. Default: the protocol's.")] = None
    num_evaluation: Annotated[
        int | None,
        Field(
            ge=1, description="Evaluation rows. Default: the protocol's; of own data a tenth, at most 500, is held out."
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None, Field(ge=1, description="Tokens of a generated answer. Default: the task's number.")
    ] = None
    samples: Annotated[
        int, Field(ge=0, description="Held-out rows of --data whose completions are generated before and after.")
    ] = 0
    exact_match: Annotated[
        Literal["no", "yes", "auto"],
        Field(
            description="Generate the completions of held-out rows of --data and count those that are right word for "
            "word; auto: where none is longer than 16 tokens."
        ),
    ] = "no"
    forgetting: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Other tasks by name: the loss on the plain text of 32 of each one's evaluation rows is scored "
            "before and after the training, and tells what it made the model forget."
        ),
    ] = None
    paper_steps: Annotated[
        bool,
        Field(
            description="Train on all rows, as the paper's step counts imply: where a task has no others, no tenth is "
            "held out to validate on, but in a run that is scored on validation rows."
        ),
    ] = False
    select_checkpoint: Annotated[
        Literal["none", "epoch"] | PositiveInt,
        Field(
            description="Keep the best of the steps that validation rows are scored at: each epoch's last, or every so "
            "many steps; none keeps the last step, as does a run without validation rows."
        ),
    ] = "none"
    select_by: Annotated[
        SelectionMetric, Field(description="What the best step is: accuracy (ties by held-out loss), or held_out_loss.")
    ] = "accuracy"
    patience: Annotated[
        int | None,
        Field(
            ge=1,
            description="Scores of --select-checkpoint in a row that may be no better before the training ends. "
            "Default: it goes on to its last step.",
        ),
    ] = None
    report_to: Annotated[
        tuple[Literal["tensorboard", "trackio", "wandb"], ...] | None,
        Field(description="Who is told losses and scores as they come: tensorboard (in logs/), trackio, wandb."),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Field(description="Of the base model's weights.")
    ] = "auto"
    device: Annotated[str, Field(description="auto, cpu, cuda, cuda:1, ...")] = "auto"

    def __reduce__(self) -> tuple[Any, ...]:
        """Through JSON: the groups' types are made from the tables of each process."""
        return RunConfig.model_validate_json, (self.model_dump_json(),)

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
    def _options_go_together(self) -> RunConfig:
        refuse_contradictions(self)
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

    @property
    def refreshes(self) -> bool:
        """Whether it may train in more than one round."""
        return self.refresh != 1

    @property
    def private_budget(self) -> PrivateBudget | None:
        """What a private training may spend; None for one that is not private."""
        if self.private_epsilon is None or self.private_delta is None:
            return None
        return PrivateBudget(self.private_epsilon, self.private_delta, self.private_clip or CLIP)

    @property
    def rows_a_step(self) -> int:
        """Training rows of one optimiser step, however they are cut into batches."""
        return self.accumulation * (1 if self.batch_size == "auto" else self.batch_size)

    def adapter_options(self, targets: Targets) -> AdapterOptions:
        """What the method builds its adapter by, on the layers that the model turned out to have."""
        return AdapterOptions(self.rank, targets, self.seed, self.core.model_dump(), self.basis, self.rank_budget)


def make_config(**values: Any) -> RunConfig:
    """A checked configuration.

    Raises:
        ConfigError: In one line, what is wrong with which option.
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
