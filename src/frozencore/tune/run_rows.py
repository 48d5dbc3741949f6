"""The rows of a run: trained on, calibrated on, scored, and those that choose a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from frozencore.files.fingerprint import fingerprint_options
from frozencore.text import num_of
from frozencore.tune.config_parts import RowsConfig, ScoringConfig
from frozencore.tune.given_rows import OWN_ROWS, RowCache, drawn, encoded, read_given
from frozencore.tune.record import UsedRows
from frozencore.tune.rows import Row, TokenRow
from frozencore.tune.rows.forms import TOO_LONG, read_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.sources import find_source, is_named
from frozencore.tune.rows.splits import calibration_rows
from frozencore.tune.scoring.score import ScoredRows

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
        epochs: The source's passes over the training rows; None for own files.
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
    def task(self) -> str | None:
        """The name of the source of the rows; None for own files."""
        return None if self.scored.name == OWN_ROWS else self.scored.name

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
        found = {name: fingerprint_rows(rows) for name, rows in sets.items()}
        if choices := [row.choices.content for row in self.held_out if row.choices is not None]:
            found["choices"] = fingerprint_options({"rows": choices})
        return found


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
    given = read_given(config, scoring, encoder, kept)
    train, scored = list(given.train), list(given.scored)
    calibration = train
    if config.calibration_data is not None:
        calibration = _other_training_rows(config, scoring, encoder, kept)
    read: dict[str, Any] = {
        name: value for name, value in given.reading if name in given.reading.model_fields_set and value is not None
    }
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
    systems = encoder.systems
    return RunRows(
        train,
        calibration_rows(calibration, config.calibration_size, seed=config.seed),
        ScoredRows(given.name, given.scoring, scored, given.max_new_tokens),
        used,
        ScoredRows(given.name, given.scoring, list(given.validation), given.max_new_tokens)
        if given.validation
        else None,
        given.epochs,
        (next(iter(systems)) or None) if len(systems) == 1 else None,
        _other_texts(config, scoring, encoder, kept),
    )


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
    if scoring.evaluate_on == "validation":
        return {}
    found = {}
    for data in scoring.forgetting or ():
        rows = drawn(config, scoring, data, kept).evaluation
        texts = [Row(row.id, completion=row.prompt + row.completion) for row in rows]
        found[find_source(data).name] = encoder.encode(texts, too_long="skip")[:OTHER_ROWS]
    return found
