"""The rows of one run, as text and as tokens: to calibrate on, to train on, to evaluate."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from frozencore.errors import DataError
from frozencore.fingerprint import fingerprint_options
from frozencore.lab.rows.own_rows import read_rows
from frozencore.lab.rows.prompts import PromptEncoder, TextRow, TokenRow
from frozencore.lab.rows.suite import find_task
from frozencore.lab.run.config import RunConfig
from frozencore.lab.tasks.splits import calibration_rows, normalised, split_task
from frozencore.lab.tasks.task import Example, Task

HELD_OUT_SHARE, HELD_OUT_MOST = 0.1, 500


@dataclass(frozen=True)
class RunRows:
    """Rows of a task, or of the user's own file.

    Attributes:
        task, evaluation: None and empty for own data, which is scored by held-out loss alone.
        train, calibration, held_out: Token rows; calibration rows are drawn by the run's seed from the training rows,
            of ``calibration_task`` where one is named.
    """

    task: Task | None
    evaluation: tuple[Example, ...]
    train: list[TokenRow]
    calibration: list[TokenRow]
    held_out: list[TokenRow]

    def fingerprints(self) -> dict[str, str]:
        """A hash of each set of rows."""
        sets = {"train": self.train, "calibration": self.calibration, "evaluation": self.held_out}
        return {name: fingerprint_options({"rows": [asdict(row) for row in rows]}) for name, rows in sets.items()}


def prepare_rows(config: RunConfig, encoder: PromptEncoder) -> RunRows:
    """Load, split and tokenise what the configuration names.

    Raises:
        DataError, ConfigError: Missing, malformed, empty or overlong rows.
    """
    if config.task is not None:
        return _task_rows(config, find_task(config.task), encoder)
    assert config.data is not None
    return _own_rows(config, config.data, encoder)


def _task_rows(config: RunConfig, task: Task, encoder: PromptEncoder) -> RunRows:
    splits = split_task(
        task,
        config.data_root,
        num_train=config.num_train,
        num_evaluation=config.num_evaluation,
        paper_steps=config.paper_steps,
    )
    evaluation = splits.evaluation if config.evaluate_on == "evaluation" else splits.validation
    if not evaluation:
        raise DataError(f"Task {task.name!r} leaves no validation rows. Train on fewer with --num-train.")
    train, held_out = (_tokens(examples, encoder) for examples in (splits.train, evaluation))
    return RunRows(task, evaluation, train, _calibration_rows(config, splits.train, encoder), held_out)


def _calibration_rows(config: RunConfig, train: Sequence[Example], encoder: PromptEncoder) -> list[TokenRow]:
    if config.calibration_task is not None:
        train = split_task(find_task(config.calibration_task), config.data_root).train
    return _tokens(calibration_rows(train, config.calibration_size, seed=config.seed), encoder)


def _tokens(examples: Sequence[Example], encoder: PromptEncoder) -> list[TokenRow]:
    return encoder.training_rows([encoder.render(example) for example in examples])


def _own_rows(config: RunConfig, path: Path, encoder: PromptEncoder) -> RunRows:
    texts = read_rows(path, encoder)
    wanted = config.num_evaluation or min(HELD_OUT_MOST, max(1, round(HELD_OUT_SHARE * len(texts))))
    train, held_out = _hold_out(texts, wanted)
    if not train:
        raise DataError(f"{path} needs rows to train on beside those held out, but its {len(texts)} rows read alike.")
    train = train[: config.num_train]
    if config.calibration_task is not None:
        calibrate = _calibration_rows(config, (), encoder)
    else:
        chosen = sorted(train, key=lambda row: _rank(row, config.seed + 1))[: config.calibration_size]
        calibrate = encoder.training_rows(chosen)
    return RunRows(None, (), encoder.training_rows(train), calibrate, encoder.training_rows(held_out))


def _hold_out(texts: Sequence[TextRow], num_held_out: int) -> tuple[list[TextRow], list[TextRow]]:
    """Training rows and held-out rows; the seed does not move them, and rows that read alike stay together."""
    by_text: dict[str, list[TextRow]] = {}
    for row in texts:
        by_text.setdefault(normalised(row.context + row.completion), []).append(row)
    train: list[TextRow] = []
    held_out: list[TextRow] = []
    for rows in sorted(by_text.values(), key=lambda rows: _rank(rows[0], 0)):
        (held_out if len(held_out) < num_held_out else train).extend(rows)
    return train, held_out


def _rank(row: TextRow, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{row.id}".encode()).digest()
