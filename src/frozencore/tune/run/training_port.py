"""The port of training: what is to be trained goes in, what became of it comes out; and the recipe that it follows.

Single runs, sweeps, tenants and campaigns share it. Eight rows at once were trained on 1.4 to 3.6 times as fast as one
after the other (a CPU core, models of a million parameters, rows of 10 to 60 tokens, one length or many). The step is
the same to rounding: its loss is the mean over the completion tokens of all its rows. Rows that fit go in groups of
similar length (:mod:`frozencore.tune.training.batching`) where less padding is worth another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from warnings import WarningMessage

from peft import PeftModel
from torch import nn

from frozencore.adapter.bases.calibrate import Calibration
from frozencore.adapter.bases.refresh_plan import COST
from frozencore.device import memory_of
from frozencore.maths.capture import Capture
from frozencore.tune.methods import Targets
from frozencore.tune.rows.prompts import PROTOCOL_MAX_LENGTH
from frozencore.tune.run.bench import Bench
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.costs import PeakMemory
from frozencore.tune.run.row_sets import RunRows
from frozencore.tune.training.batching import pass_tokens_of
from frozencore.tune.training.recipe import PLAIN, Recipe, epochs_for
from frozencore.tune.training.reporting import Reports
from frozencore.tune.training.train import TrainingReport
from frozencore.words import Progress


def recipe_of(config: RunConfig, rows: RunRows, model: nn.Module) -> Recipe:
    """What the configuration says of the training, with the defaults of its method and its task.

    Args:
        model: It decides how many rows fit at once, where that is left to it.
    """
    batch_size, accumulation, pass_tokens = config.batch_size, config.accumulation, None
    method, laid_out = config.method_entry, config.padding_free
    if batch_size == "auto":
        longest = max(row.num_tokens for row in rows.train)
        pass_tokens = None if laid_out or config.beta else pass_tokens_of(model)
        if config.private_budget is not None:  # the record says the batch size: it must not tell how long rows are
            longest, pass_tokens = config.max_length or PROTOCOL_MAX_LENGTH, None
        batch_size = rows_at_once(config.rows_a_step, longest, model, padding_free=laid_out)
        accumulation = config.rows_a_step // batch_size
    return Recipe(
        learning_rate=config.resolved_learning_rate,
        warmup=config.resolved_warmup,
        epochs=config.epochs or (rows.task.epochs if rows.task else epochs_for(len(rows.train), config.rows_a_step)),
        batch_size=batch_size,
        accumulation=accumulation,
        seed=config.seed,
        refresh=config.refresh,
        refresh_cost=config.refresh_cost or COST,
        refresh_memory=config.refresh_memory,
        pass_tokens=pass_tokens,
        padding_free=laid_out,
        optimiser=method.optimiser or PLAIN,
        optimiser_rank=config.rank if method.optimiser else None,
        private=config.private_budget,
        beta=config.beta,
    )


SHARE_OF_MEMORY = 0.5  # beside the weights; the rest is for the allocator's gaps, the scoring, and other programs
LOGIT_BYTES = 12  # of a token and a word of the vocabulary: as computed, in float32, and their gradient


def rows_at_once(rows_a_step: int, longest: int, model: Any, *, padding_free: bool = False) -> int:
    """The largest divisor of a step's rows that fits into the memory of the model's device, at the longest row.

    The memory is the device's whole, not what is free: a run that is resumed cuts its steps as before.

    Args:
        longest: Tokens of the longest training row.
        model: Of transformers, adapted or not.
        padding_free: They are laid end to end in one row, over all of which attention runs.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    there = SHARE_OF_MEMORY * (memory_of(next(model.parameters()).device) - weights)

    def of(rows: int) -> int:
        return row_bytes(rows * longest, model) if padding_free else rows * row_bytes(longest, model)

    return next((n for n in range(rows_a_step, 1, -1) if rows_a_step % n == 0 and of(n) <= there), 1)


def row_bytes(length: int, model: Any) -> int:
    """About what a row of that many tokens keeps for the backward pass through frozen layers: rather more than less."""
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    of_a_layer = 12 * hidden + 5 * inner + config.num_attention_heads * length
    values = config.num_hidden_layers * of_a_layer * next(model.parameters()).element_size()
    return length * (values + config.vocab_size * LOGIT_BYTES)


@dataclass(frozen=True)
class Training:
    """An adapter that is ready to train, and what the run knows before it does.

    Attributes:
        folder: The folder of the run.
        captures: What the bases capture, by layer.
        hashes: SHA-256 of the base model and of the rows, by name.
        memory: Measures the phases of the run.
        warned: Warnings of the run so far.
        started: ``time.perf_counter()`` when the run began.
        identity: What a checkpoint must share with this run.
    """

    config: RunConfig
    bench: Bench
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
    """What a training made.

    Attributes:
        training: What was trained, with the configuration that it trained by: of a sweep, the best one.
    """

    training: Training
    report: TrainingReport

    @property
    def recipe(self) -> Recipe:
        """The recipe as it was followed, with the number of rounds that there were."""
        config, bench = self.training.config, self.training.bench
        recipe = recipe_of(config, bench.rows, bench.model)
        return replace(recipe, refresh=self.report.rounds) if config.refresh == "auto" else recipe


Train = Callable[[Training], Outcome]
