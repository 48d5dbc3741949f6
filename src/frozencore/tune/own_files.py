"""The user's own files as a task: they are read, split into the rows of a run, and scored by their completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from frozencore.errors import ConfigError, NoRowsError
from frozencore.tune.config_parts import RowsConfig, ScoringConfig
from frozencore.tune.record import ReadRows, SourceRows
from frozencore.tune.rows import TextRow, TokenRow
from frozencore.tune.rows.own_rows import OwnRows, read_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row_sources import named, sources_of
from frozencore.tune.scoring.exact_match import are_short
from frozencore.tune.scoring.score import OWN_ROWS, ScoredRows
from frozencore.tune.tasks.splits import Splits, hold_out, normalised_text, without

TOO_LONG, BEYOND, IN_BOTH = "too long", "beyond --num-evaluation", "also in --eval-data"


class OwnFiles:
    """The files of ``--data``, and that of ``--eval-data`` as ``given``.

    Args:
        most_rows: Only the first so many good rows of each file are used.

    Raises:
        DataError, ConfigError: A source cannot be read, no row of it is left, or it does not suit the options.
    """

    def __init__(self, config: RowsConfig, encoder: PromptEncoder, *, most_rows: int | None = None) -> None:
        assert config.data is not None

        def read(source: str, prefix: str = "") -> OwnRows:
            own = read_rows(source, encoder, config.columns, skip_bad=config.skip_bad, prefix=prefix)
            if most_rows is not None:
                own = own.only(own.texts[:most_rows], BEYOND)
            stay, num_cut = encoder.drop_too_long(own.texts)
            self.num_cut += num_cut
            return own.only(stay, TOO_LONG)

        self._config, self.num_cut, sources = config, 0, sources_of(config.data)
        prefixes = [f"{i}:{named(source)}:" for i, source in enumerate(sources, start=1)] if len(sources) > 1 else [""]
        self.files = [read(source, prefix) for source, prefix in zip(sources, prefixes, strict=True)]
        self.given = None if config.eval_data is None else read(config.eval_data)
        self.every = [*self.files, *([self.given] if self.given else [])]
        self.num_skipped = sum(file.left_out[TOO_LONG] for file in self.every)
        if config.loss_on == "all" and not any(file.is_talk for file in self.files):
            raise ConfigError(f"--loss-on all is about conversations, but {config.learns} holds none. Leave it out.")

    def split(self, scoring: ScoringConfig) -> Splits[TextRow]:
        """The rows of a run: those to evaluate on, then, if wanted, a tenth of the others to choose by, then the rest.

        Raises:
            NoRowsError: No row is left to train on.
        """
        config, is_trial = self._config, scoring.evaluate_on == "validation"
        rows = [text for file in self.files for text in file.texts]
        unused = sum((Counter(file.left_out) for file in self.files), Counter())
        if self.given is None:
            train, evaluation = hold_out(rows, config.num_evaluation)
        else:
            evaluation = list(self.given.texts[: config.num_evaluation])
            train = list(without(rows, set(map(normalised_text, evaluation))))
            unused |= {f"{why} (--eval-data)": count for why, count in self.given.left_out.items()}
            unused[BEYOND], unused[IN_BOTH] = len(self.given.texts) - len(evaluation), len(rows) - len(train)
        validation: list[TextRow] = []
        if is_trial or scoring.select_checkpoint != "none":
            train, validation = hold_out(train)
        if not train:
            why = "read alike" if len(rows) > unused[IN_BOTH] else "are all in --eval-data too"
            raise NoRowsError(
                f"{config.learns} needs rows to train on beside those held out, but its {len(rows)} rows {why}."
            )
        if is_trial and self.given is None:
            unused["kept to evaluate on"] = len(evaluation)
        unused["beyond --num-train"] = len(train[config.num_train :]) if config.num_train else 0
        used = tuple(train[: config.num_train])
        return Splits(used, tuple(validation), tuple(evaluation), "10% of train" if validation else "none", unused)

    def scored(self, tokens: list[TokenRow], exact_match: str = "auto") -> ScoredRows:
        """Rows to score: if all completions are short, they are generated and compared."""
        compares = exact_match == "yes" or (exact_match == "auto" and are_short(tokens))
        has_answers = all(file.columns != ("text",) for file in self.every)
        return ScoredRows(OWN_ROWS, "completion" if compares and has_answers else "text", tokens)

    def reading(self, left_out: Mapping[str, int], tokens: Iterable[TokenRow]) -> ReadRows:
        """A summary of what was read, and what of it was not used or was changed."""
        further: dict[str, Any] = {}
        if len(self.files) > 1:
            further["sources"] = tuple(
                SourceRows(source=own.source, read=own.num_read, drawn=len(own.texts)) for own in self.files
            )
        if self.given is not None:
            further["held_out_from"] = named(self.given.source)
        return ReadRows(
            read=sum(own.num_read for own in self.files),
            columns=tuple(dict.fromkeys(column for own in self.files for column in own.columns)),
            left_out={why: count for why, count in left_out.items() if count},
            unused_columns=tuple(dict.fromkeys(column for own in self.every for column in own.unused)),
            changed=Counter(what for own in self.every for text in own.texts for what in text.changed),
            joined=sum(bool(row.overlap) for row in tokens) or None,
            **further,
        )
