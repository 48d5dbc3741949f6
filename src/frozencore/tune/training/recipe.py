"""The training recipe (paper, appendix "Complete Experimental Protocol"), also as transformers' arguments."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from frozencore.distributed import num_ranks
from frozencore.errors import ConfigError
from frozencore.tune.config_parts import TrainingConfig

DEFAULTS = TrainingConfig()
"""The default options of a run; their values are the recipe's defaults."""

FEWEST_STEPS, MOST_EPOCHS = 32, 8
MAX_GRAD_NORM, WEIGHT_DECAY = 1.0, 0.0  # of every training
LEADS = "eval_leads"  # the metric by which the Trainer keeps a step


def epochs_for(num_rows: int, effective_batch_size: int) -> int:
    """Default epochs for the user's rows: enough for ``FEWEST_STEPS`` optimizer steps, at most ``MOST_EPOCHS``."""
    return min(MOST_EPOCHS, math.ceil(FEWEST_STEPS / math.ceil(num_rows / effective_batch_size)))


@dataclass(frozen=True)
class Recipe:
    """The recipe of a training.

    Attributes:
        learning_rate: The peak learning rate; None until it is measured on the model.
        warmup: Share of the optimizer steps in which the learning rate rises; the first one already trains.
        batch_size: Examples in one forward pass.
        accumulation: Forward passes in one optimizer step.
        seed: Seed of the row order.
        overhead_tokens: The fixed cost of a pass in tokens. The rows of a step are then grouped by length, each group
            with at most the tokens of ``batch_size`` longest rows. None, or several processes: ``batch_size`` rows in
            order.
    """

    learning_rate: float | None
    warmup: float
    epochs: int = 1
    batch_size: int = 1
    accumulation: int = DEFAULTS.accumulation
    seed: int = DEFAULTS.seed
    overhead_tokens: int | None = None

    def of_each(self, processes: int) -> Recipe:
        """The recipe of one of several processes, which takes an equal share of every step's rows.

        Raises:
            ConfigError: A step's rows cannot be shared evenly.
        """
        rows = self.batch_size * self.accumulation
        if rows % processes:
            raise ConfigError(
                f"The rows of an optimiser step are shared evenly, but a step has {rows} for {processes} processes. "
                "Choose --batch-size and --accumulation whose product is a multiple of that number."
            )
        share = rows // processes
        batch_size = next(n for n in range(min(self.batch_size, share), 0, -1) if share % n == 0)
        return replace(self, batch_size=batch_size, accumulation=share // batch_size)

    def content(self) -> dict[str, Any]:
        """The recipe as JSON values by name, for records; ``overhead_tokens`` only if it is set."""
        options = {name: value for name, value in asdict(self).items() if (name, value) != ("overhead_tokens", None)}
        return {**options, "max_grad_norm": MAX_GRAD_NORM, "weight_decay": WEIGHT_DECAY}

    def of_steps(self) -> dict[str, Any]:
        """The options that determine the result of each step, except for rounding: its rows may be split in any way."""
        rows = self.batch_size * self.accumulation
        return replace(self, batch_size=rows, accumulation=1, overhead_tokens=None).content()

    @property
    def peak_rate(self) -> float:
        """The learning rate, which is known when training begins."""
        assert self.learning_rate is not None
        return self.learning_rate

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step, counted from 0: a linear rise, then a cosine to zero. It is never zero."""
        return self.peak_rate * self.share_of_rate(step, num_steps)

    def share_of_rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step as a share of the peak."""
        rise = math.ceil(self.warmup * num_steps)
        if step < rise:
            return (step + 1) / (rise + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, num_steps - rise)))

    def row_order(self, num_rows: int, epoch: int) -> list[int]:
        """The order of the rows in an epoch, counted from 0: independent for each seed and each epoch."""
        drawn = sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn[:4]))  # torch reads 32 bits of a seed
        return torch.randperm(num_rows, generator=generator, device="cpu").tolist()

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps over all epochs; the last step of an epoch may have fewer rows."""
        return self.epochs * math.ceil(math.ceil(num_rows / self.batch_size) / self.accumulation)


def require_reporters(names: Sequence[str]) -> None:
    """Check before any work that the reporters' packages are installed.

    Raises:
        ConfigError: A package is missing.
    """
    for name in set(names).difference(get_available_reporting_integrations() if names else ()):
        raise ConfigError(
            f"To report to {name} takes its package, which is not installed here. pip install {name}, or leave it "
            "out of --report-to."
        )


OF_SEVERAL = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""The variables by which accelerate takes a process for one of several."""


@contextmanager
def _alone() -> Iterator[None]:
    """Hide what a scheduler or another program left of :data:`OF_SEVERAL`, if this process is in no group."""
    hidden = {name: os.environ.pop(name) for name in OF_SEVERAL if name in os.environ} if num_ranks() == 1 else {}
    try:
        yield
    finally:
        os.environ |= hidden


@_alone()
def training_arguments(
    model: nn.Module,
    recipe: Recipe,
    share: Recipe,
    folder: Path,
    *,
    save_steps: int | None,
    score_steps: int | None,
    report_to: Sequence[str] = (),
) -> TrainingArguments:
    """The recipe as transformers' arguments.

    Args:
        share: The recipe of this process.
        folder: The folder of checkpoints.
        save_steps: Steps between checkpoints; None saves nothing to resume from.
        score_steps: Steps between scores on validation rows, which choose the step to keep; None for no choice. Each
            scored step has a checkpoint.
        report_to: The reporters of transformers. The name of the folder above and the time name the run there.
    """
    saves = score_steps or save_steps
    arguments = TrainingArguments(
        output_dir=str(folder),
        learning_rate=recipe.peak_rate,
        num_train_epochs=recipe.epochs,
        per_device_train_batch_size=share.batch_size,
        gradient_accumulation_steps=share.accumulation,
        max_grad_norm=MAX_GRAD_NORM,
        weight_decay=WEIGHT_DECAY,
        seed=recipe.seed,
        data_seed=recipe.seed,
        save_strategy="no" if saves is None else "steps",
        save_steps=saves or 1,
        save_only_model=save_steps is None,
        save_total_limit=2 if score_steps is None else 3,  # the newest may be incomplete, another one the best
        eval_strategy="no" if score_steps is None else "steps",
        eval_steps=score_steps,
        load_best_model_at_end=score_steps is not None,
        metric_for_best_model=None if score_steps is None else LEADS,
        greater_is_better=None if score_steps is None else True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=list(report_to) or "none",
        run_name=f"{folder.absolute().parent.name}-{time.strftime('%Y%m%d-%H%M%S')}",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        restore_callback_states_from_checkpoint=True,
        use_cpu=next(model.parameters()).device.type == "cpu",
        optim="adamw_torch_fused",
    )
    if arguments.mixed_precision != "no":  # of the environment: `accelerate launch` sets it, also by its configuration
        what = f"accelerate's mixed precision ({arguments.mixed_precision}) is not used: --dtype is that of a run."
        warnings.warn(what, stacklevel=2)
        arguments.mixed_precision = "no"
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # several devices go through accelerate; DataParallel would multiply the batch
    if arguments.distributed_state.distributed_type == DistributedType.NO:
        _take_device(arguments, next(model.parameters()).device)
    return arguments


def _take_device(arguments: TrainingArguments, device: torch.device) -> None:
    """Let the Trainer train on this device; by itself it takes the first GPU and moves the model there."""
    vars(arguments)["_setup_devices"] = device  # the cached value of ``arguments.device``
    arguments.distributed_state.device = device  # accelerate's; it moves the batches
    if device.type == "cuda":
        torch.cuda.set_device(device)
