"""The end of a run: what was trained is scored and saved, and its record written last of all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from warnings import WarningMessage

from peft import PeftModel

from frozencore.adapter.bases.access import basis_fingerprint
from frozencore.adapter.bases.calibrate import Calibration
from frozencore.adapter.saved.card import write_model_card
from frozencore.errors import DivergenceError, ModelError
from frozencore.files.whole_file import write_json, write_lines
from frozencore.maths.capture import Capture
from frozencore.tune.methods import Targets
from frozencore.tune.run.bench import Bench
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.costs import PeakMemory
from frozencore.tune.run.folder import ADAPTER, CHECKPOINTS, FOUND, PREDICTIONS, RECORD, SAMPLES
from frozencore.tune.run.make_record import TrainedRun, calibrated_on, headline, make_record
from frozencore.tune.run.record import TunedRecord
from frozencore.tune.run.record_parts import Resolved
from frozencore.tune.run.scores import samples_of, score_run
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport
from frozencore.words import Progress, as_stage


@dataclass(frozen=True)
class Made:
    """What a run has made by the end of its training, and what it has noted on the way.

    Attributes:
        started: ``time.perf_counter()`` when it began.
    """

    model: PeftModel
    calibration: Calibration | None
    calibration_s: float
    captures: Mapping[str, Capture]
    memory: PeakMemory
    training: TrainingReport
    targets: Targets
    hashes: Mapping[str, str]
    warned: Sequence[WarningMessage]
    started: float


def finish(config: RunConfig, bench: Bench, out: Path, made: Made, recipe: Recipe, progress: Progress) -> TunedRecord:
    """Score, save and record a trained run, and take away what only an interrupted one needs.

    Raises:
        DivergenceError: The trained model's loss on the rows is not finite.
    """
    method = config.method_entry
    try:
        with made.memory.phase("scoring"):
            after = score_run(config, made.model, bench, as_stage(progress, "score"))
    except ModelError as error:  # the same rows were scored before training
        raise DivergenceError(
            f"Training diverged: {error} Lower the learning rate ({config.resolved_learning_rate})."
        ) from error
    method.save(made.model, out / ADAPTER, out / "start")
    basis = {"basis": basis_fingerprint(made.model)} if method.has_bases else {}
    record = make_record(
        config,
        bench,
        TrainedRun(
            made.model, out / ADAPTER, made.calibration, made.calibration_s, made.captures, made.memory, made.training,
            after,
        ),
        resolved=Resolved(targets=made.targets, recipe=recipe.content(), max_length=bench.encoder.max_length),
        hashes={**made.hashes, **basis},
        warned=[entry for entry in made.warned if entry.category is UserWarning],
        started=made.started,
    )  # fmt: skip
    if method.has_bases:
        said = calibrated_on(config, bench, made.calibration)
        write_model_card(out / ADAPTER, calibration=said, scores=headline(after))
    if after.task is not None and config.private_budget is None:  # they hold the texts of held-out rows
        write_lines(out / PREDICTIONS, map(asdict, after.task.predictions))
    assert bench.before is not None
    if after.samples:
        write_lines(out / SAMPLES, samples_of(bench, bench.before.samples, after.samples))
    for left in (CHECKPOINTS, FOUND, "start"):
        shutil.rmtree(out / left, ignore_errors=True)
    write_json(out / RECORD, record.content())
    return record
