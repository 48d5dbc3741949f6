"""The interface of training: a :class:`Training` goes in, an :class:`Outcome` comes out; and the recipe.

Single runs, tenants and campaigns use it. Training on eight rows at once was 1.4 to 3.6 times as fast as on one
row at a time (a CPU core, models of a million parameters, rows of 10 to 60 tokens, of one or many lengths). The step is
the same except for rounding: its loss is the mean over the completion tokens of all its rows. Rows are grouped by
length (:mod:`frozencore.tune.training.batching`) if less padding is worth another pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from warnings import WarningMessage

from peft import PeftModel
from torch import nn

from frozencore.adapter.calibrate import Calibration
from frozencore.device import memory_of
from frozencore.maths.capture import Capture
from frozencore.tune.config import RunConfig
from frozencore.tune.methods import Targets
from frozencore.tune.run.costs import PeakMemory
from frozencore.tune.run.prepare import PreparedRun
from frozencore.tune.run.row_sets import RunRows
from frozencore.tune.training.batching import pass_tokens_of
from frozencore.tune.training.recipe import Recipe, epochs_for
from frozencore.tune.training.reporting import Reports
from frozencore.tune.training.train import TrainingReport
from frozencore.words import Progress


def recipe_of(config: RunConfig, rows: RunRows, model: nn.Module) -> Recipe:
    """Make the recipe of a configuration, with the defaults of its method and task.

    Args:
        model: Determines how many rows fit at once, if the batch size is ``auto``.
    """
    batch_size, accumulation, pass_tokens = config.training.batch_size, config.training.accumulation, None
    if batch_size == "auto":
        longest = max(row.num_tokens for row in rows.train)
        pass_tokens = pass_tokens_of(model)
        batch_size = rows_at_once(config.training.rows_a_step, longest, model)
        accumulation = config.training.rows_a_step // batch_size
    return Recipe(
        learning_rate=config.resolved_learning_rate,
        warmup=config.resolved_warmup,
        epochs=config.training.epochs
        or (rows.task.epochs if rows.task else epochs_for(len(rows.train), config.training.rows_a_step)),
        batch_size=batch_size,
        accumulation=accumulation,
        seed=config.training.seed,
        pass_tokens=pass_tokens,
    )


SHARE_OF_MEMORY = 0.5  # of the memory beside the weights; the rest is for fragmentation, scoring and other programs
LOGIT_BYTES = 12  # per token and vocabulary entry: logits, in float32, and their gradient


def rows_at_once(rows_a_step: int, longest: int, model: Any) -> int:
    """The largest divisor of a step's rows that fits into the memory of the model's device, if all are the longest row.

    It uses the device's total memory, not the free memory, so that a resumed run splits its steps as before.

    Args:
        longest: Tokens of the longest training row.
        model: A model of transformers, adapted or not.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    there = SHARE_OF_MEMORY * (memory_of(next(model.parameters()).device) - weights)
    fitting = there // row_bytes(longest, model)
    return next((n for n in range(rows_a_step, 1, -1) if rows_a_step % n == 0 and n <= fitting), 1)


def row_bytes(length: int, model: Any) -> int:
    """Estimate, from above, the bytes that a row keeps for the backward pass through frozen layers."""
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    of_a_layer = 12 * hidden + 5 * inner + config.num_attention_heads * length
    values = config.num_hidden_layers * of_a_layer * next(model.parameters()).element_size()
    return length * (values + config.vocab_size * LOGIT_BYTES)


@dataclass(frozen=True)
class Training:
    """An adapter that is ready to train, and the state of its run.

    Attributes:
        folder: The folder of the run.
        captures: The capture of each layer's basis.
        hashes: SHA-256 of the base model and of the rows, by name.
        memory: Measures the phases of the run.
        warned: The run's warnings so far.
        started: ``time.perf_counter()`` when the run began.
        identity: Values that a checkpoint must share with this run.
    """

    config: RunConfig
    prepared: PreparedRun
    model: PeftModel
    targets: Targets
    folder: Path
    hashes: Mapping[str, str]
    memory: PeakMemory
    started: float
    progress: Progress
    identity: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None
    calibration_s: float = 0.0
    captures: Mapping[str, Capture] = field(default_factory=dict)
    warned: Sequence[WarningMessage] = ()
    resume: bool = False
    reports: Reports | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a training."""

    training: Training
    report: TrainingReport

    @property
    def recipe(self) -> Recipe:
        prepared = self.training.prepared
        return recipe_of(self.training.config, prepared.rows, prepared.model)
