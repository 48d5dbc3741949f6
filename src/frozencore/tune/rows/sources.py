"""Sources of rows that have names and splits, such as the tasks of the lab: ``task:sst2``.

An installed package names its kinds of sources among the entry points ``frozencore.sources``: before the colon stands
the name of a :class:`SourceKind`, behind it the name of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, Protocol

from frozencore.errors import LAB_MISSING, ConfigError
from frozencore.tune.rows.row import Row
from frozencore.tune.rows.splits import Splits

Scoring = Literal["choice", "exact_match", "completion", "text"]
"""How rows are scored: by the likeliest choice, a generated number, a generated completion, or held-out loss alone."""
TASK = "task"
"""The kind of the lab's sources."""


class Source(Protocol):
    """Rows with splits of their own, and how models are trained on them and scored."""

    @property
    def name(self) -> str: ...
    @property
    def scoring(self) -> Scoring: ...
    @property
    def epochs(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...

    def draw(
        self,
        data_root: Path | None,
        *,
        num_train: int | None,
        num_evaluation: int | None,
        train_on_all: bool,
        seed: int,
    ) -> Splits[Row]:
        """The rows of a run.

        Args:
            num_train, num_evaluation: Sizes in place of the source's defaults.
            train_on_all: Hold out no training rows for validation.
            seed: Seed of the subsets.

        Raises:
            DataError: The rows cannot be read.
            NoRowsError: No row is left for training or evaluation.
        """

    def draw_evaluation(self, data_root: Path | None, *, num_evaluation: int | None) -> tuple[Row, ...]:
        """The rows that :meth:`draw` evaluates, without reading the others."""


@dataclass(frozen=True)
class SourceKind:
    """A kind of sources.

    Attributes:
        find: The source of a name; raises ``ConfigError`` if there is none.
        names: The known names.
        groups: Names that stand for several sources.
    """

    find: Callable[[str], Source]
    names: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@cache
def source_kind(kind: str) -> SourceKind | None:
    """The kind of sources of this name; None if no installed package has it."""
    return next((entry.load() for entry in entry_points(group="frozencore.sources", name=kind)), None)


def is_named(data: str) -> bool:
    """Whether this names a source of a known kind, not a file or a split of a data set."""
    kind, colon, _ = data.partition(":")
    return bool(colon) and (kind == TASK or source_kind(kind) is not None)


def find_source(data: str) -> Source:
    """The source that ``data`` names.

    Raises:
        ConfigError: There is no such source, or its package is not installed.
    """
    kind, _, name = data.partition(":")
    if (known := source_kind(kind)) is None:
        raise ConfigError(f"{data}: {LAB_MISSING}")
    return known.find(name)
