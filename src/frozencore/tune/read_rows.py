"""Read, draw, hold out and tokenise the rows of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from frozencore.errors import ConfigError, NoRowsError
from frozencore.files.fingerprint import fingerprint_options
from frozencore.text import num_of
from frozencore.tune.config import RowsConfig, ScoringConfig
from frozencore.tune.record import ReadRows, SourceRows
from frozencore.tune.rows import Example, TextRow, TokenRow
from frozencore.tune.rows.own_rows import read_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row_sources import Data, named, sources_of
from frozencore.tune.scoring.exact_match import are_short
from frozencore.tune.task_registry import find_task
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.splits import (
    SPLIT_SEED,
    TaskSplits,
    ValidationSource,
    calibration_rows,
    hold_out,
    normalised,
    share_of,
    split_task,
)

TOO_LONG = "too long"
OTHER_ROWS = 32


@dataclass(frozen=True)
class ScoredRows:
    """Rows to score a model on, as the task's examples (empty for own data) and as tokens."""

    examples: tuple[Example, ...]
    tokens: list[TokenRow]


@dataclass(frozen=True)
class RunRows:
    """Rows of a task, or of the user's own file.

    Attributes:
        task, evaluation: None and empty for own data, which is scored by held-out loss alone.
        train, calibration, held_out: Token rows. Calibration rows are drawn by the run's seed from the training rows,
            or from those of ``calibration_task``. The held-out rows are scored.
        validation_from: The source of validation rows, also if they are not used.
        validation: The rows that choose a step; None if no step is chosen or no row is left.
        num_cut, num_skipped: The number of rows with a cut prompt, and of rows left out as too long; 0 if the
            configuration does not allow it.
        reading: A summary of reading own rows; None for a task.
        exact_match: Whether completions of own rows are generated and compared.
        system: The system text that all conversations begin with; None if there is none.
        others: Plain texts of other tasks by task; their loss before and after training shows what the run forgets.
    """

    task: Task | None
    evaluation: tuple[Example, ...]
    train: list[TokenRow]
    calibration: list[TokenRow]
    held_out: list[TokenRow]
    validation_from: ValidationSource
    validation: ScoredRows | None = None
    num_cut: int = 0
    num_skipped: int = 0
    reading: ReadRows | None = None
    exact_match: bool = False
    system: str | None = None
    others: Mapping[str, list[TokenRow]] = field(default_factory=dict)

    @property
    def scored(self) -> ScoredRows:
        """The rows that give the run's score."""
        return ScoredRows(self.evaluation, self.held_out)

    @property
    def in_words(self) -> str:
        """What was read, and what of it was left out, cut, changed or not used, on one line."""
        said = [f"{num_of(len(self.train), 'row')} to train on, {len(self.held_out):,} to score"]
        if self.num_cut:
            said.append(f"{num_of(self.num_cut, 'prompt')} cut")
        if self.num_skipped:
            said.append(f"{num_of(self.num_skipped, 'row')} skipped as too long")
        if self.reading:
            said += [f"{count:,} left out: {why}" for why, count in self.reading.left_out.items() if why != TOO_LONG]
            said += self.reading.not_as_given
        return ", ".join(said)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each set of rows."""
        sets = {"train": self.train, "calibration": self.calibration, "evaluation": self.held_out}
        if self.validation is not None:
            sets["validation"] = self.validation.tokens
        if self.others:
            sets["others"] = [row for rows in self.others.values() for row in rows]
        return {name: fingerprint_options({"rows": [row.content for row in rows]}) for name, rows in sets.items()}


Rows = TypeVar("Rows")
MOST_ROWS = 20_000  # about a hundred megabytes for the paper's tasks


class RowCache:
    """Rows by key; the rows that were not used for the longest time are dropped first.

    Args:
        most_rows: The most rows to keep; a larger set is never kept.
    """

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self._most_rows = most_rows
        self._kept: dict[Hashable, tuple[Any, int]] = {}

    def get(self, key: Hashable, make: Callable[[], Rows], count: Callable[[Rows], int]) -> Rows:
        """Return the rows under this key, or make and keep them; ``count`` gives their number."""
        found: Rows
        if key in self._kept:
            found, num_rows = self._kept.pop(key)
        else:
            found = make()
            num_rows = count(found)
        self._kept[key] = found, num_rows  # as the newest
        while sum(rows for _, rows in self._kept.values()) > self._most_rows:
            del self._kept[next(iter(self._kept))]
        return found


def prepare_rows(
    config: RowsConfig, scoring: ScoringConfig, encoder: PromptEncoder, kept: RowCache | None = None
) -> RunRows:
    """Read, split and tokenise the configured rows.

    Args:
        scoring: Determines which rows are scored, and which choose a step.
        kept: Rows that earlier runs have read and tokenised.

    Raises:
        DataError, ConfigError: Rows are missing, malformed, empty or too long.
    """
    if config.task is not None:
        task = find_task(config.task)
        if scoring.max_new_tokens is not None:
            task = replace(task, max_new_tokens=scoring.max_new_tokens)
        rows = _task_rows(config, scoring, task, encoder, kept or RowCache())
    else:
        assert config.data is not None
        rows = _own_rows(config, scoring, config.data, encoder)
    system = next(iter(encoder.systems)) if len(encoder.systems) == 1 else ""
    return replace(
        rows, system=system or None, others=_other_texts(config, scoring, encoder, kept or RowCache())
    )  # fmt: skip


def task_splits(config: RowsConfig, scoring: ScoringConfig, kept: RowCache | None = None) -> TaskSplits:
    """The splits of the run's task; ``paper_steps`` trains on all rows only if evaluation rows give the score.

    Raises:
        DataError: The task's rows cannot be read.
        NoRowsError: No row is left for training or for scoring.
    """
    assert config.task is not None
    splits = _splits_of(config, scoring, config.task, kept or RowCache(), config.num_train, config.num_evaluation)
    if scoring.evaluate_on == "validation" and not splits.validation:
        raise NoRowsError(
            f"Task {config.task!r} leaves no validation rows beside its {len(splits.train)} to train on. "
            "Give it more rows, or leave out what is to be chosen on them."
        )
    return splits


def _splits_of(
    config: RowsConfig,
    scoring: ScoringConfig,
    task: str,
    kept: RowCache,
    num_train: int | None = None,
    num_evaluation: int | None = None,
) -> TaskSplits:
    train_on_all = config.paper_steps and scoring.evaluate_on == "evaluation"
    seed = config.seed if config.rows_by_seed else SPLIT_SEED
    return kept.get(
        (task, num_train, num_evaluation, config.data_root, train_on_all, seed),
        lambda: split_task(
            find_task(task),
            config.data_root,
            num_train=num_train,
            num_evaluation=num_evaluation,
            train_on_all=train_on_all,
            seed=seed,
        ),
        lambda splits: len(splits.train) + len(splits.validation) + len(splits.evaluation),
    )


def _task_rows(
    config: RowsConfig, scoring: ScoringConfig, task: Task, encoder: PromptEncoder, kept: RowCache
) -> RunRows:
    splits, fitting = task_splits(config, scoring, kept), _Fitting(config, encoder)
    evaluation = splits.evaluation if scoring.evaluate_on == "evaluation" else splits.validation
    of_training, evaluation = fitting.examples(splits.train), fitting.examples(evaluation)
    train, held_out = (_tokens(config, examples, encoder, kept) for examples in (of_training, evaluation))
    calibration = _rows_of_calibration_task(config, scoring, encoder, kept)
    if calibration is None:
        tokens_of = dict(zip(of_training, train, strict=True))
        drawn = calibration_rows(of_training, config.calibration_size, seed=config.seed)
        calibration = [tokens_of[example] for example in drawn]
    validation = None
    if scoring.select_checkpoint != "none" and splits.validation:
        chosen_on = fitting.examples(splits.validation)
        validation = ScoredRows(chosen_on, _tokens(config, chosen_on, encoder, kept))
    return RunRows(
        task, evaluation, train, calibration, held_out, splits.validation_from, validation,
        num_cut=fitting.num_cut, num_skipped=fitting.num_skipped,
        reading=ReadRows(left_out=dict(splits.left_out)) if splits.left_out else None,
    )  # fmt: skip


def _rows_of_calibration_task(
    config: RowsConfig, scoring: ScoringConfig, encoder: PromptEncoder, kept: RowCache
) -> list[TokenRow] | None:
    """The calibration rows of the calibration task; None if the run names none."""
    if config.calibration_task is None:
        return None
    train = _Fitting(config, encoder).examples(_splits_of(config, scoring, config.calibration_task, kept).train)
    return _tokens(config, calibration_rows(train, config.calibration_size, seed=config.seed), encoder, kept)


def _tokens(config: RowsConfig, examples: Sequence[Example], encoder: PromptEncoder, kept: RowCache) -> list[TokenRow]:
    encoded_by = (
        getattr(encoder.tokenizer, "backend_tokenizer", encoder.tokenizer),  # one for all runs of a loaded model
        config.max_length,
        config.too_long,
        config.prompt_style,
    )
    return kept.get(
        (tuple(examples), encoded_by),
        lambda: encoder.training_rows([encoder.render(example) for example in examples]),
        len,
    )


def _other_texts(
    config: RowsConfig, scoring: ScoringConfig, encoder: PromptEncoder, kept: RowCache
) -> dict[str, list[TokenRow]]:
    """The first evaluation rows of each other task that fit, as plain text; none for a run that validates options."""
    if scoring.evaluate_on == "validation":
        return {}
    found = {}
    for task in scoring.forgetting or ():
        examples = _splits_of(config, scoring, task, kept).evaluation
        rows = encoder.whole_rows([TextRow(row.id, "", row.prompt + row.completion) for row in examples])
        found[task] = [row for row in rows if len(row.input_ids) <= encoder.max_length][:OTHER_ROWS]
    return found


def _own_rows(config: RowsConfig, scoring: ScoringConfig, data: Data, encoder: PromptEncoder) -> RunRows:
    fitting, sources = _Fitting(config, encoder), sources_of(data)
    prefixes = [f"{i}:{named(source)}:" for i, source in enumerate(sources, start=1)] if len(sources) > 1 else [""]
    read = [
        read_rows(source, encoder, config.columns, skip_bad=config.skip_bad, prefix=prefix)
        for source, prefix in zip(sources, prefixes, strict=True)
    ]
    parts = [fitting.texts(own.texts) for own in read]
    texts = [text for part in parts for text in part]
    given = None
    if config.eval_data is not None:
        given = read_rows(config.eval_data, encoder, config.columns, skip_bad=config.skip_bad)
    every = [*read, *([] if given is None else [given])]
    forms = {own.columns for own in every}
    if config.loss_on == "all" and not any(own.is_talk for own in read):
        raise ConfigError(f"--loss-on all is about conversations, but {config.learns} holds none. Leave it out.")

    unused: Counter[str] = Counter()
    for own in read:
        unused.update(own.bad)
    unused[TOO_LONG] = fitting.num_skipped
    if given is None:
        train, held_out = hold_out(texts, config.num_evaluation or share_of(texts), _read_as)
    else:
        fitting_too = fitting.texts(given.texts)
        held_out = fitting_too[: config.num_evaluation]
        unused |= {f"{why} (--eval-data)": count for why, count in given.bad.items()}
        unused["too long (--eval-data)"] = len(given.texts) - len(fitting_too)
        unused["beyond --num-evaluation"] = len(fitting_too) - len(held_out)
        known = {_read_as(text) for text in held_out}
        train = [text for text in texts if _read_as(text) not in known]
        unused["also in --eval-data"] = len(texts) - len(train)
    validated: list[TextRow] = []
    if scoring.evaluate_on == "validation" or scoring.select_checkpoint != "none":
        train, validated = hold_out(train, share_of(train), _read_as)
    if scoring.evaluate_on == "validation":
        unused["kept to evaluate on"] = len(held_out) if given is None else 0
        held_out = validated
    if not train:
        why = "read alike" if len(texts) > unused["also in --eval-data"] else "are all in --eval-data too"
        raise NoRowsError(
            f"{config.learns} needs rows to train on beside those held out, but its {len(texts)} rows {why}."
        )
    unused["beyond --num-train"] = max(0, len(train) - (config.num_train or len(train)))
    train = train[: config.num_train]
    rows, scored = encoder.training_rows(train), encoder.training_rows(held_out)
    calibrate = _rows_of_calibration_task(config, scoring, encoder, RowCache())
    if calibrate is None:
        calibrate = list(calibration_rows(rows, config.calibration_size, seed=config.seed))
    chooses = scoring.select_checkpoint != "none"
    compares = scoring.exact_match == "yes" or (scoring.exact_match == "auto" and are_short(scored))
    validation = ScoredRows((), encoder.training_rows(validated)) if chooses else None
    several = [
        SourceRows(source=source, read=own.num_read, drawn=len(part))
        for source, own, part in zip(sources, read, parts, strict=True)
    ]
    reading = ReadRows(
        read=sum(own.num_read for own in read),
        columns=tuple(dict.fromkeys(column for own in read for column in own.columns)),
        left_out={why: count for why, count in unused.items() if count},
        unused_columns=tuple(dict.fromkeys(column for own in every for column in own.unused)),
        changed=Counter(what for own in every for text in own.texts for what in text.changed),
        joined=sum(bool(row.overlap) for row in (*rows, *scored)) or None,
        sources=tuple(several) if len(several) > 1 else (),
        held_out_from=None if config.eval_data is None else named(config.eval_data),
    )
    return RunRows(
        None, (), rows, calibrate, scored, "10% of train" if validated else "none", validation, num_cut=fitting.num_cut,
        num_skipped=fitting.num_skipped, exact_match=compares and ("text",) not in forms,
        reading=reading,
    )  # fmt: skip


class _Fitting:
    """Drop rows that are too long, if allowed, and count them and the prompts to cut."""

    def __init__(self, config: RowsConfig, encoder: PromptEncoder) -> None:
        self._encoder, self._may_drop = encoder, config.too_long != "refuse"
        self.num_cut = self.num_skipped = 0

    def texts(self, rows: list[TextRow]) -> list[TextRow]:
        return [row for row, fits in zip(rows, self._fits(rows), strict=True) if fits]

    def examples(self, examples: Sequence[Example]) -> tuple[Example, ...]:
        if not self._may_drop:
            return tuple(examples)
        fits = self._fits([self._encoder.render(example) for example in examples])
        return tuple(example for example, one in zip(examples, fits, strict=True) if one)

    def _fits(self, rows: Sequence[TextRow]) -> list[bool]:
        if not self._may_drop:
            return [True] * len(rows)
        found = self._encoder.fits(rows)
        skipped = found.count("too long")
        if rows and skipped == len(rows):
            raise NoRowsError(
                f"--too-long left none of {len(rows)} rows: all are longer than {self._encoder.max_length} tokens. "
                "Raise the limit with --max-length."
            )
        self.num_cut += found.count("cut")
        self.num_skipped += skipped
        return [fit != "too long" for fit in found]


def _read_as(row: TextRow) -> str:
    return normalised(row.context + row.completion)
