"""Train one run with several values of some options, side by side on one basis; validation rows choose the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from frozencore.adapter.swap import swap_core
from frozencore.errors import ConfigError, DivergenceError, NoRowsError
from frozencore.files.whole_file import write_json
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.execute import execute
from frozencore.tune.run.prepare import prepare
from frozencore.tune.run.record import Sweep, SweptRun, TunedRecord
from frozencore.tune.run.run_folder import CHECKPOINTS, refuse_used
from frozencore.tune.run.training_port import Outcome, Training, recipe_of
from frozencore.tune.training.many.tenant import Tenant, Trained, Validation
from frozencore.tune.training.many.train import train_many
from frozencore.words import Progress


def execute_sweep(
    config: RunConfig,
    choices: Mapping[str, Sequence[Any]],
    out: Path,
    progress: Progress,
    *,
    resume: bool = False,
    moments_file: Path | None = None,
) -> tuple[TunedRecord, Sweep]:
    """Train a run with every combination of the values at once, and write the best as :func:`execute` does.

    The basis comes from the configuration, including its seed; a swept seed changes only the order of rows. The scores
    of all runs are in ``out/sweep.json``.

    Args:
        choices: Values by option, for options in :data:`frozencore.tune.run.config.SWEPT`.

    Raises:
        ConfigError: The method trains no cores.
        NoRowsError: There are no validation rows.
        FrozenCoreError: As in :func:`execute`.
    """
    if not config.method_entry.has_bases:
        raise ConfigError(f"A sweep trains cores side by side on one basis, but {config.method!r} has no cores.")
    config.refuse_alone("the runs of a sweep")
    chooses = config if config.select_checkpoint != "none" else config.model_copy(update={"select_checkpoint": "epoch"})
    refuse_used(out, resume=resume)
    prepared = prepare(chooses, progress)
    rows = prepared.rows.validation
    if rows is None or not rows.tokens:
        raise NoRowsError("A sweep chooses by validation rows, but none are left beside those that train.")
    combinations = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    swept: list[Sweep] = []

    def train(training: Training) -> Outcome:
        config, prepared, model, out = training.config, training.prepared, training.model, training.folder
        configs = [config.model_copy(update=options) for options in combinations]
        tenants = {}
        for number, one in enumerate(configs):
            plain = Tenant(prepared.rows.train, recipe_of(one, prepared.rows, prepared.model))
            every = plain.num_steps if one.select_checkpoint == "none" else one.select_checkpoint
            tenants[str(number)] = Tenant(plain.rows, plain.recipe, Validation(rows.tokens, every, one.patience))
        trained = train_many(
            model,
            tenants,
            pad_id=prepared.encoder.pad_id,
            checkpoint_dir=out / CHECKPOINTS,
            checkpoint_steps=config.save_steps,
            resume=training.resume,
            identity=training.identity,
            progress=training.progress,
        )
        runs = tuple(_swept(options, one) for options, one in zip(combinations, trained.values(), strict=True))
        losses = {number: run.held_out_loss for number, run in enumerate(runs) if run.held_out_loss is not None}
        if not losses:
            raise DivergenceError(str(trained["0"].diverged))
        best = min(losses, key=lambda number: losses[number])
        swept.append(Sweep(rows=len(rows.tokens), runs=runs, best=best))
        write_json(out / "sweep.json", swept[0].content())
        swap_core(model, trained[str(best)].cores)
        return Outcome(replace(training, config=configs[best]), trained[str(best)].report)

    record = execute(config, out, progress, prepared=prepared, resume=resume, moments_file=moments_file, train=train)
    return record, swept[0]


def _swept(options: Mapping[str, Any], trained: Trained) -> SweptRun:
    chosen = trained.report.selected
    if trained.diverged is not None or chosen is None:
        return SweptRun(options=dict(options), diverged=trained.diverged)
    loss = next(score.held_out_loss for score in chosen.scores if score.step == chosen.step)
    return SweptRun(options=dict(options), held_out_loss=loss, kept_step=chosen.step)
