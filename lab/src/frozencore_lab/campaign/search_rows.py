"""Where the rows that a search is scored on come from: looked up before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from frozencore.errors import DataError, NoRowsError
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.reading_rows import task_splits
from frozencore_lab.campaign.plan import Planned
from frozencore_lab.campaign.worker import Place

_DECIDES_SPLITS = ("task", "num_train", "num_evaluation")


@dataclass(frozen=True)
class SearchRows:
    """The rows of one task's trials.

    Attributes:
        studies: Those whose searches have these trials.
        trained, scored, source: How many rows, and where those to score on come from; None and empty where ``unseen``.
        unseen: Why the rows could not be looked at from here.
    """

    task: str
    studies: tuple[str, ...]
    trained: int | None = None
    scored: int | None = None
    source: str = ""
    unseen: str = ""


def search_rows(planned: Iterable[Planned], place: Place) -> list[SearchRows]:
    """The rows of every task that some study searches on.

    Raises:
        NoRowsError: A task leaves none to search on; the line names task and study.
    """
    studies: dict[tuple[object, ...], list[str]] = {}
    configs: dict[tuple[object, ...], RunConfig] = {}
    for run in planned:
        if run.phase == "search" and run.job and run.job.config.task is not None:
            config = place.put(run.job.config)
            key = tuple(getattr(config, name) for name in _DECIDES_SPLITS)
            configs.setdefault(key, config)
            studies.setdefault(key, []).append(run.study)
    return [_look(config, tuple(dict.fromkeys(studies[key]))) for key, config in configs.items()]


def _look(config: RunConfig, studies: Sequence[str]) -> SearchRows:
    task = str(config.task)
    try:
        splits = task_splits(config)
    except NoRowsError as error:
        raise NoRowsError(f"Study {studies[0]!r} searches on task {task!r}, but has no rows for it: {error}") from error
    except DataError as error:
        return SearchRows(task, tuple(studies), unseen=str(error))
    return SearchRows(task, tuple(studies), len(splits.train), len(splits.validation), splits.validation_from)
