"""The end of a run: what was trained is scored and saved, and its record written last of all."""

from __future__ import annotations

import shutil
from dataclasses import asdict

from frozencore.adapter.bases.access import basis_fingerprint
from frozencore.adapter.saved.card import write_model_card
from frozencore.errors import DivergenceError, ModelError
from frozencore.files.whole_file import write_json, write_lines
from frozencore.tune.run.folder import ADAPTER, CHECKPOINTS, FOUND, PREDICTIONS, RECORD, SAMPLES
from frozencore.tune.run.make_record import calibrated_on, headline, make_record
from frozencore.tune.run.record import TunedRecord
from frozencore.tune.run.scores import samples_of, score_run
from frozencore.tune.run.training import Outcome
from frozencore.words import as_stage


def finish(outcome: Outcome) -> TunedRecord:
    """Score, save and record a trained run, and take away what only an interrupted one needs.

    Raises:
        DivergenceError: The trained model's loss on the rows is not finite.
    """
    training = outcome.training
    config, bench, out, model = training.config, training.bench, training.folder, training.model
    method = config.method_entry
    try:
        with training.memory.phase("scoring"):
            after = score_run(config, model, bench, as_stage(training.progress, "score"))
    except ModelError as error:  # the same rows were scored before training
        raise DivergenceError(
            f"Training diverged: {error} Lower the learning rate ({config.resolved_learning_rate})."
        ) from error
    method.save(model, out / ADAPTER, out / "start")
    basis = {"basis": basis_fingerprint(model)} if method.has_bases else {}
    record = make_record(outcome, after, {**training.hashes, **basis})
    if method.has_bases:
        said = calibrated_on(config, bench, training.calibration)
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
