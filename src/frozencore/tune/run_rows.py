"""The rows of a run: read, dropped if they are too long, split and tokenised, for a task and for own files alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from frozencore.errors import NoRowsError
from frozencore.files.fingerprint import fingerprint_options
from frozencore.text import num_of
from frozencore.tune.config_parts import RowsConfig, ScoringConfig
from frozencore.tune.own_files import TOO_LONG, OwnFiles
from frozencore.tune.record import UsedRows
from frozencore.tune.rows import Example, TextRow, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.score import ScoredRows
from frozencore.tune.task_registry import find_task
from frozencore.tune.tasks.splits import SPLIT_SEED, Splits, calibration_rows, split_task

OTHER_ROWS = 32


@dataclass(frozen=True)
class RunRows:
    """The rows of a run.

    Attributes:
        train, calibration: Token rows. Calibration rows are drawn by the run's seed from the training rows, or from
            those of ``calibration_task``.
        scored: The rows that give the run's score.
        used: What was read, used and left out, for the record.
        validation: The rows that choose a step; None if no step is chosen or no row is left.
        epochs: The task's passes over the training rows; None for own files.
        system: The system text that all conversations begin with; None if there is none.
        others: Plain texts of other tasks by task; their loss before and after training shows what the run forgets.
    """

    train: list[TokenRow]
    calibration: list[TokenRow]
    scored: ScoredRows
    used: UsedRows
    validation: ScoredRows | None = None
    epochs: int | None = None
    system: str | None = None
    others: Mapping[str, list[TokenRow]] = field(default_factory=dict)

    @property
    def held_out(self) -> list[TokenRow]:
        """The rows that give the run's score, as tokens."""
        return self.scored.tokens

    @property
    def in_words(self) -> str:
        """What was read, and what of it was left out, cut, changed or not used, on one line."""
        used = self.used
        said = [f"{num_of(used.trained, 'row')} to train on, {used.scored:,} to score"]
        if used.cut:
            said.append(f"{num_of(used.cut, 'prompt')} cut")
        if used.skipped:
            said.append(f"{num_of(used.skipped, 'row')} skipped as too long")
        said += [f"{count:,} left out: {why}" for why, count in used.left_out.items() if why != TOO_LONG]
        return ", ".join([*said, *used.not_as_given])

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each set of rows."""
        sets = {"train": self.train, "calibration": self.calibration, "evaluation": self.held_out}
        if self.validation is not None:
            sets["validation"] = self.validation.tokens
        if self.others:
            sets["others"] = [row for rows in self.others.values() for row in rows]
        return {name: fingerprint_rows(rows) for name, rows in sets.items()}


def fingerprint_rows(rows: Iterable[TokenRow]) -> str:
    """SHA-256 of rows as tokens, in their order."""
    return fingerprint_options({"rows": [row.content for row in rows]})


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
    """Read, drop, split and tokenise the configured rows.

    Args:
        scoring: Determines which rows are scored, and which choose a step.
        kept: Rows that earlier runs have read and tokenised.

    Raises:
        DataError, ConfigError: Rows are missing, malformed, empty or too long.
    """
    kept = kept or RowCache()
    own = None if config.data is None else OwnFiles(config, encoder)
    splits: Splits[Any] = task_splits(config, scoring, kept) if own is None else own.split(scoring)
    is_trial = scoring.evaluate_on == "validation"
    cut, skipped = (0, 0) if own is None else (own.num_cut, own.num_skipped)

    def encode(rows: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[TokenRow]]:
        """The rows that stay, as they are and as tokens."""
        nonlocal cut, skipped
        stay = rows
        if own is None:  # long rows of files were left out before the split
            stay, num_cut = encoder.drop_too_long(rows)
            cut, skipped = cut + num_cut, skipped + len(rows) - len(stay)
        return stay, _tokens(config, stay, encoder, kept)

    _, train = encode(splits.train)
    to_score, tokens = encode(splits.validation if is_trial else splits.evaluation)
    if own is None:
        task = find_task(config.task or "")
        scored, epochs = ScoredRows.of(task, to_score, tokens, scoring.max_new_tokens), task.epochs
        read: dict[str, Any] = {"left_out": dict(splits.left_out)} if splits.left_out else {}
    else:
        scored, epochs = own.scored(tokens, scoring.exact_match), None
        reading = own.reading(splits.left_out, (*train, *tokens))
        read = {name: value for name, value in reading if value is not None}
    validation = None
    if scoring.select_checkpoint != "none" and splits.validation:
        validation = scored
        if not is_trial:
            chosen_on, tokens = encode(splits.validation)
            validation = replace(scored, examples=chosen_on if own is None else (), tokens=tokens)
    calibration = _calibration_rows(config, scoring, encoder, kept, train)
    others = _other_texts(config, scoring, encoder, kept)
    system = next(iter(encoder.systems)) if len(encoder.systems) == 1 else ""
    if config.too_long == "cut":
        read["cut"] = cut
    if config.too_long != "refuse":
        read["skipped"] = skipped
    used = UsedRows(
        trained=len(train),
        scored=len(scored.tokens),
        scored_on=scoring.evaluate_on,
        validation_from=splits.validation_from,
        **read,
    )
    return RunRows(train, calibration, scored, used, validation, epochs, system or None, others)


def task_splits(config: RowsConfig, scoring: ScoringConfig, kept: RowCache | None = None) -> Splits[Example]:
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
) -> Splits[Example]:
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


def _calibration_rows(
    config: RowsConfig, scoring: ScoringConfig, encoder: PromptEncoder, kept: RowCache, train: list[TokenRow]
) -> list[TokenRow]:
    """Rows of the calibration task if one is named, else training rows."""
    if config.calibration_task is None:
        return list(calibration_rows(train, config.calibration_size, seed=config.seed))
    rows, _ = encoder.drop_too_long(_splits_of(config, scoring, config.calibration_task, kept).train)
    return _tokens(config, calibration_rows(rows, config.calibration_size, seed=config.seed), encoder, kept)


def _tokens(
    config: RowsConfig, rows: tuple[Example | TextRow, ...], encoder: PromptEncoder, kept: RowCache
) -> list[TokenRow]:
    encoded_by = (
        getattr(encoder.tokenizer, "backend_tokenizer", encoder.tokenizer),  # one for all runs of a loaded model
        config.max_length,
        config.too_long,
        config.prompt_style,
    )
    return kept.get(
        (rows, encoded_by),
        lambda: encoder.training_rows(rows),
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
