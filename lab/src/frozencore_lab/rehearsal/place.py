"""Where a rehearsal happens: every run as the campaign has it, put on stand-ins and few rows.

A run keeps its identity, so that plan, store and report are those of the real campaign.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from frozencore.tune.rows.prompts import PROTOCOL_MAX_LENGTH
from frozencore.tune.run.config import RunConfig
from frozencore.tune.suite import find_task
from frozencore_lab.campaign.worker import Place
from frozencore_lab.rehearsal.rows import EVALUATED, STEPS, epochs_of, fewest_calibrated

CALIBRATED = 4
MOST_NEW_TOKENS = 3  # a random model does not end its answers
LONGER = 4  # a stand-in's tokenizer knows few words
IN_16_BITS = ("bfloat16", "float16")


@dataclass(frozen=True)
class RehearsalPlace(Place):
    """Puts runs on stand-ins.

    Attributes:
        num_train: How many rows each task trains on.
        stand_ins: Models whose tokenizers are ours.
        tasks_in_16_bits: Runs of other tasks have 32 bits where the campaign has 16.
        is_quick: All of them in 32 bits, and all examples of an optimiser step at once.
    """

    num_train: dict[str, int] = field(default_factory=dict)
    stand_ins: tuple[str, ...] = ()
    tasks_in_16_bits: tuple[str, ...] = ()
    is_quick: bool = False

    def put(self, config: RunConfig) -> RunConfig:
        """The run with fewer rows, epochs, rounds, calibration examples and tokens to generate."""
        assert config.task is not None
        task = find_task(config.task)
        changes: dict[str, Any] = {
            "num_train": min(self.num_train[config.task], config.num_train or task.num_train),
            "num_evaluation": min(EVALUATED, config.num_evaluation or task.num_evaluation),
            "calibration_size": max(fewest_calibrated(config), min(CALIBRATED, config.calibration_size)),
            "epochs": epochs_of(task, config),
            "refresh": STEPS if config.refresh == "auto" else min(STEPS, config.refresh),
            "max_new_tokens": min(MOST_NEW_TOKENS, config.max_new_tokens or task.max_new_tokens),
        }
        if config.model in self.stand_ins and not config.truncate:
            changes["max_length"] = LONGER * (config.max_length or PROTOCOL_MAX_LENGTH)
        if self.is_quick or (config.dtype in IN_16_BITS and config.task not in self.tasks_in_16_bits):
            changes["dtype"] = "float32"
        if self.is_quick:
            changes |= {"batch_size": config.rows_a_step, "accumulation": 1}
        return super().put(config.model_copy(update=changes))
