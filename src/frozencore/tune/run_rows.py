"""The rows of a run as tokens, by their use: trained on, calibrated on, scored, and those that choose a step.

They are read from the user's files, or drawn from a source that has splits of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from frozencore.errors import ConfigError, NoRowsError
from frozencore.options import fingerprint_options
from frozencore.text import num_of
from frozencore.tune.config_parts import RowsConfig, ScoringConfig
from frozencore.tune.record import ReadRows, SourceRows, UsedRows
from frozencore.tune.rows.forms import BEYOND, TEXT, TOO_LONG, EncodedSource, read_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import Row, TokenRow
from frozencore.tune.rows.row_sources import named
from frozencore.tune.rows.sources import Scoring, find_source, is_named
from frozencore.tune.rows.splits import SPLIT_SEED, Splits, calibration_rows, hold_out
from frozencore.tune.scoring.exact_match import SHORT, are_short
from frozencore.tune.scoring.score import ScoredRows

USER_ROWS = "own rows"
IN_BOTH = "also in --eval-data"
SCORED_TOO = "scored, so not calibrated on (--calibration-data)"
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
        rows: Rows
        if key in self._kept:
            rows, num_rows = self._kept.pop(key)
        else:
            rows = make()
            num_rows = count(rows)
        self._kept[key] = rows, num_rows  # as the newest
        while sum(rows for _, rows in self._kept.values()) > self._most_rows:
            del self._kept[next(iter(self._kept))]
        return rows


@dataclass(frozen=True)
class GivenRows:
    """The rows of a run as tokens, by their use, and how they are scored.

    Attributes:
        name: The name of the source, or :data:`USER_ROWS`.
        scored: The rows that give the score; validation rows if options are chosen by them.
        validation: The rows that choose a step; empty if no step is chosen or no row is left.
        num_skipped: The number of rows left out because they are too long.
        reading: The numbers of rows of files that were read, not used or changed; of other sources ``left_out``.
        unseen: Rows for a later score, which nothing of this run may see.
        epochs: The source's number of passes over the training rows, if it has one.
    """

    name: str
    scoring: Scoring
    train: Sequence[TokenRow]
    scored: Sequence[TokenRow]
    validation: Sequence[TokenRow]
    validation_from: str
    num_skipped: int
    reading: ReadRows
    epochs: int | None = None
    max_new_tokens: int = SHORT + 1
    unseen: Sequence[TokenRow] = ()


def drawn(
    config: RowsConfig,
    scoring: ScoringConfig,
    data: str,
    kept: RowCache,
    num_train: int | None = None,
    num_evaluation: int | None = None,
) -> Splits[Row]:
    """The rows of a source with splits; ``paper_steps`` trains on all rows only if evaluation rows give the score.

    Raises:
        DataError: The rows cannot be read.
        NoRowsError: No row is left for training or for scoring.
    """
    train_on_all = config.paper_steps and not scoring.is_trial
    seed = config.seed if config.rows_by_seed else SPLIT_SEED
    splits: Splits[Row] = kept.get(
        (data, num_train, num_evaluation, config.data_root, train_on_all, seed),
        lambda: find_source(data).draw(
            config.data_root,
            num_train=num_train,
            num_evaluation=num_evaluation,
            train_on_all=train_on_all,
            seed=seed,
        ),
        lambda splits: len(splits.train) + len(splits.validation) + len(splits.evaluation),
    )
    return splits


def drawn_for_run(config: RowsConfig, scoring: ScoringConfig, kept: RowCache | None = None) -> Splits[Row]:
    """The rows of a run's source, see :func:`drawn`; ``NoRowsError`` if it needs validation rows and has none."""
    (data,) = config.sources
    splits = drawn(config, scoring, data, kept or RowCache(), config.num_train, config.num_evaluation)
    if scoring.is_trial and not splits.validation:
        raise NoRowsError(
            f"{data} leaves no validation rows beside its {len(splits.train)} to train on. "
            "Give it more rows, or leave out what is to be chosen on them."
        )
    return splits


def encoded(rows: Sequence[Row], encoder: PromptEncoder, kept: RowCache) -> list[TokenRow]:
    """Rows of a source as tokens, from the cache if an earlier run encoded them in the same way."""
    decides = (
        getattr(encoder.tokenizer, "backend_tokenizer", encoder.tokenizer),  # one for all runs of a loaded model
        encoder.max_length,
        encoder.too_long,
        encoder.is_chat,
        encoder.loss_on,
    )
    return kept.get((tuple(rows), decides), lambda: encoder.encode(rows), len)


def _given_by_source(config: RowsConfig, scoring: ScoringConfig, encoder: PromptEncoder, kept: RowCache) -> GivenRows:
    source, splits = find_source(config.sources[0]), drawn_for_run(config, scoring, kept)
    is_trial, chooses = scoring.is_trial, scoring.choose_every is not None
    parts = [splits.train, splits.validation if is_trial else splits.evaluation]
    parts += [splits.validation] if chooses and not is_trial else []
    train, scored, *others = (encoded(rows, encoder, kept) for rows in parts)
    chosen_on = scored if is_trial else next(iter(others), [])
    return GivenRows(
        source.name,
        source.scoring,
        train,
        scored,
        chosen_on if chooses else [],
        splits.validation_from,
        sum(map(len, parts)) - sum(map(len, (train, scored, *others))),
        ReadRows(left_out=dict(splits.left_out)) if splits.left_out else ReadRows(),
        source.epochs,
        scoring.max_new_tokens or source.max_new_tokens,
    )


@dataclass(frozen=True)
class UserData:
    """The files of ``--data`` and that of ``--eval-data``, encoded."""

    files: Sequence[EncodedSource]
    held_out: EncodedSource | None = None
    learns: str = ""

    @classmethod
    def read(cls, config: RowsConfig, encoder: PromptEncoder, *, most_rows: int | None = None) -> UserData:
        """Read the files.

        Args:
            most_rows: Use only the first so many good rows of each file.

        Raises:
            DataError, ConfigError: A file cannot be read, no row of it is left, or it does not suit the options.
        """

        def read(source: str, prefix: str = "") -> EncodedSource:
            return read_rows(
                source, encoder, config.columns, skip_bad=config.skip_bad, prefix=prefix, most_rows=most_rows
            )

        sources = config.sources
        prefixes = [f"{i}:{named(source)}:" for i, source in enumerate(sources, start=1)] if len(sources) > 1 else [""]
        files = [read(source, prefix) for source, prefix in zip(sources, prefixes, strict=True)]
        if config.loss_on == "all" and not any(file.is_talk for file in files):
            raise ConfigError(f"--loss-on all is about conversations, but {config.learns} holds none. Leave it out.")
        return cls(files, None if config.eval_data is None else read(config.eval_data), config.learns)

    @property
    def every(self) -> list[EncodedSource]:
        return [*self.files, *([self.held_out] if self.held_out else [])]

    def given(self, config: RowsConfig, scoring: ScoringConfig) -> GivenRows:
        """The rows of a run: those to evaluate on, then, if wanted, a tenth of the others to choose by, then the rest.

        Raises:
            NoRowsError: No row is left to train on.
        """
        is_trial, chooses = scoring.is_trial, scoring.choose_every is not None
        rows = [row for file in self.files for row in file.rows]
        texts = {row_id: text for file in self.files for row_id, text in file.texts.items()}
        unused = sum((file.left_out for file in self.files), Counter())
        if self.held_out is None:
            train, evaluation = hold_out(rows, texts, config.num_evaluation)
        else:
            evaluation = self.held_out.rows[: config.num_evaluation]
            evaluated = {self.held_out.texts[row.id] for row in evaluation}
            train = [row for row in rows if texts[row.id] not in evaluated]
            unused |= {f"{why} (--eval-data)": count for why, count in self.held_out.left_out.items()}
            unused[BEYOND], unused[IN_BOTH] = len(self.held_out.rows) - len(evaluation), len(rows) - len(train)
        validation: list[TokenRow] = []
        if is_trial or chooses:
            train, validation = hold_out(train, texts)
        if not train:
            fewer = ", a smaller --num-evaluation," if len(rows) > 1 else ""
            why = f", all held out: give more rows{fewer} or others to score (--eval-data)"
            if len(rows) == unused[IN_BOTH]:
                why = ", all in --eval-data too"
            elif len(rows) > len(set(texts.values())) == 1:
                why = " that read alike"
            has = num_of(len(rows), "row")
            raise NoRowsError(f"{config.learns} needs rows to train on beside those held out, but has {has}{why}.")
        if is_trial and self.held_out is None:
            unused["kept to evaluate on"] = len(evaluation)
        unused["beyond --num-train"] = len(train[config.num_train :]) if config.num_train else 0
        train, scored = train[: config.num_train], validation if is_trial else evaluation
        chosen_on = validation if chooses and scoring.select_by == "accuracy" else []
        answers = (len(row.input_ids) - row.prompt_end for row in (*scored, *chosen_on))
        return GivenRows(
            USER_ROWS,
            self.scoring(scored, scoring.exact_match, chosen_on),
            train,
            scored,
            validation if chooses else [],
            "10% of train" if validation else "none",
            sum(file.left_out[TOO_LONG] for file in self.every),
            self.reading(unused, (*train, *scored)),
            max_new_tokens=scoring.max_new_tokens or max(SHORT + 1, *answers),
            unseen=evaluation,
        )

    def scoring(
        self, rows: Sequence[TokenRow], exact_match: str = "auto", chosen_on: Sequence[TokenRow] = ()
    ) -> Scoring:
        """How rows are scored: by their choices; or, if all completions are short, by generating and comparing them.

        Args:
            chosen_on: Rows whose accuracy chooses a step; it is counted in the same way.
        """
        if all(row.choices is not None for row in (*rows, *chosen_on)):
            return "choice"
        compares = exact_match == "yes" or (exact_match == "auto" and are_short(rows))
        has_answers = all(file.columns != TEXT for file in self.every)
        return "completion" if compares and has_answers else "text"

    def reading(self, left_out: Mapping[str, int], used: Iterable[TokenRow]) -> ReadRows:
        """A summary of the rows that were read, and of those that were not used or were changed."""
        further: dict[str, Any] = {}
        if len(self.files) > 1:
            further["sources"] = tuple(
                SourceRows(source=file.source, read=file.num_read, drawn=len(file.rows)) for file in self.files
            )
        if self.held_out is not None:
            further["held_out_from"] = named(self.held_out.source)
        return ReadRows(
            read=sum(file.num_read for file in self.files),
            columns=tuple(dict.fromkeys(column for file in self.files for column in file.columns)),
            left_out={why: count for why, count in left_out.items() if count},
            unused_columns=tuple(dict.fromkeys(column for file in self.every for column in file.unused)),
            changed=Counter(what for file in self.every for row in file.rows for what in row.changed),
            joined=sum(bool(row.overlap) for row in used) or None,
            **further,
        )


OTHER_ROWS = 32


@dataclass(frozen=True)
class RunRows:
    """The rows of a run.

    Attributes:
        train, calibration: Calibration rows are drawn by the run's seed from the training rows, or from those of
            ``calibration_data``.
        scored: The rows that give the run's score.
        used: What was read, used and left out, for the record.
        validation: The rows that choose a step; None if no step is chosen or no row is left.
        epochs: The source's passes over the training rows; None for the user's files.
        system: The system text that all conversations begin with; None if there is none.
        others: Plain texts of other sources by name; their loss before and after training shows what the run forgets.
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
    def scored_or_choosing(self) -> list[TokenRow]:
        """The rows that give the run's score or choose a step."""
        return [*self.held_out, *(self.validation.tokens if self.validation else [])]

    @property
    def task(self) -> str | None:
        """The name of the source of the rows; None for the user's files."""
        return None if self.scored.name == USER_ROWS else self.scored.name

    @property
    def in_words(self) -> str:
        """The numbers of rows that are used, left out, cut or changed, on one line."""
        used = self.used
        parts = [f"{num_of(used.trained, 'row')} to train on, {used.scored:,} to score"]
        if used.cut:
            parts.append(f"{num_of(used.cut, 'prompt')} cut")
        if used.skipped:
            parts.append(f"{num_of(used.skipped, 'row')} skipped as too long")
        parts += [f"{count:,} left out: {why}" for why, count in used.left_out.items() if why != TOO_LONG]
        return ", ".join([*parts, *used.not_as_given])

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each set of rows."""
        sets = {"train": self.train, "calibration": self.calibration, "evaluation": self.held_out}
        if self.validation is not None:
            sets["validation"] = self.validation.tokens
        if self.others:
            sets["others"] = [row for rows in self.others.values() for row in rows]
        hashes = {name: fingerprint_rows(rows) for name, rows in sets.items()}
        if choices := [row.choices.content for row in self.held_out if row.choices is not None]:
            hashes["choices"] = fingerprint_options({"rows": choices})
        return hashes


def fingerprint_rows(rows: Iterable[TokenRow]) -> str:
    """SHA-256 of rows as tokens, in their order."""
    return fingerprint_options({"rows": [row.content for row in rows]})


def prepare_rows(
    config: RowsConfig, scoring: ScoringConfig, encoder: PromptEncoder, kept: RowCache | None = None
) -> RunRows:
    """Read, split and encode the configured rows, each once.

    Args:
        scoring: Determines which rows are scored, and which choose a step.
        kept: Rows that earlier runs have read and encoded.

    Raises:
        DataError, ConfigError: Rows are missing, malformed, empty or too long.
    """
    kept = kept or RowCache()
    if is_named(config.sources[0]):
        given = _given_by_source(config, scoring, encoder, kept)
    else:
        given = UserData.read(config, encoder).given(config, scoring)
    train, scored = list(given.train), list(given.scored)
    calibration = train
    read: dict[str, Any] = {
        name: value for name, value in given.reading if name in given.reading.model_fields_set and value is not None
    }
    if config.calibration_data is not None:
        unseen = (*scored, *given.validation, *given.unseen)
        calibration, num_scored = other_calibration_rows(config, scoring, encoder, unseen, kept)
        if num_scored:
            read["left_out"] = {**read.get("left_out", {}), SCORED_TOO: num_scored}
    if config.too_long == "cut":
        sets = (train, scored, () if given.validation is given.scored else given.validation)
        read["cut"] = sum(row.num_cut > 0 for rows in sets for row in rows)
    if config.too_long != "refuse":
        read["skipped"] = given.num_skipped
    used = UsedRows(
        trained=len(train),
        scored=len(scored),
        scored_on=scoring.evaluate_on,
        validation_from=given.validation_from,
        **read,
    )
    systems = {row.system for row in train if row.system is not None}
    return RunRows(
        train,
        calibration_rows(calibration, config.calibration_size, seed=config.seed),
        ScoredRows(given.name, given.scoring, scored, given.max_new_tokens),
        used,
        ScoredRows(given.name, given.scoring, list(given.validation), given.max_new_tokens)
        if given.validation
        else None,
        given.epochs,
        (systems.pop() or None) if len(systems) == 1 else None,
        _other_texts(config, scoring, encoder, kept),
    )


def other_calibration_rows(
    config: RowsConfig,
    scoring: ScoringConfig,
    encoder: PromptEncoder,
    scored: Iterable[TokenRow],
    kept: RowCache | None = None,
) -> tuple[list[TokenRow], int]:
    """The training rows of ``calibration_data`` without those that are scored, and the number of these.

    Raises:
        NoRowsError: Every row is scored.
        DataError, ConfigError: The rows cannot be read.
    """
    rows = _other_training_rows(config, scoring, encoder, kept or RowCache())
    taken = {tuple(row.input_ids) for row in scored}
    left = [row for row in rows if tuple(row.input_ids) not in taken]
    if not left:
        raise NoRowsError(
            f"--calibration-data {config.calibration_data} holds only rows that are scored too. Name other rows, or "
            "leave it out: then the training rows are calibrated on."
        )
    return left, len(rows) - len(left)


def _other_training_rows(
    config: RowsConfig, scoring: ScoringConfig, encoder: PromptEncoder, kept: RowCache
) -> list[TokenRow]:
    """The training rows of ``calibration_data``; of a source whose long rows are refused only those to calibrate on."""
    assert config.calibration_data is not None
    if not is_named(config.calibration_data):
        return read_rows(config.calibration_data, encoder, config.columns, skip_bad=config.skip_bad).rows
    rows = drawn(config, scoring, config.calibration_data, kept).train
    if encoder.too_long == "refuse":
        rows = calibration_rows(rows, config.calibration_size, seed=config.seed)
    return encoded(rows, encoder, kept)


def _other_texts(
    config: RowsConfig, scoring: ScoringConfig, encoder: PromptEncoder, kept: RowCache
) -> dict[str, list[TokenRow]]:
    """The first evaluation rows of each other source that fit, as plain text; none for a run that validates options."""
    if scoring.is_trial:
        return {}
    texts_of = {}
    for data in scoring.forgetting or ():
        rows = drawn(config, scoring, data, kept).evaluation
        texts = [Row(row.id, completion=row.prompt + row.completion) for row in rows]
        texts_of[find_source(data).name] = encoder.encode(texts, too_long="skip")[:OTHER_ROWS]
    return texts_of
