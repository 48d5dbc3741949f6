"""The port of training: what is to be trained goes in, what became of it comes out.

Single runs, sweeps, tenants and campaigns share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from warnings import WarningMessage

from peft import PeftModel

from frozencore.adapter.bases.calibrate import Calibration
from frozencore.maths.capture import Capture
from frozencore.tune.methods import Targets
from frozencore.tune.run.bench import Bench
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.costs import PeakMemory
from frozencore.tune.run.recipe import recipe_of
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.reporting import Reports
from frozencore.tune.training.train import TrainingReport
from frozencore.words import Progress


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
