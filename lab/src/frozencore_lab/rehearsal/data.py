"""The rows of a rehearsal: a few of each data set that is at hand, rows made up by schema of each that is not.

They are laid out as the hub's own files, so that the code that reads, splits and checks rows is the real run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from frozencore.tune.run.config import RunConfig
from frozencore.tune.suite import find_task
from frozencore.tune.tasks import Split, Task
from frozencore.tune.tasks.described import FileSource
from frozencore.tune.tasks.hub import HubDataset, write_hub_folders
from frozencore_lab.rehearsal.originals import SPLITS, HubOriginal, copy_own_task, num_rows_of
from frozencore_lab.rehearsal.sizes import Shares, scaled_official, shares_of, together, used_by, widest

TEXTS_OF_A_TASK = 200


@dataclass
class StandInData:
    """The rows that stand for a campaign's.

    Attributes:
        root: Where they lie: a run's ``data_root``.
        shares: Of the real rows, by task as the campaign names it.
        own_tasks: By a user's YAML file, its copy with few rows.
        at_hand: Data sets whose real rows were taken.
        made_up: By data set that is not at hand, why not.
        sources: What lies under ``root``.
        texts: Some of the rows as text, to learn a tokenizer from.
    """

    root: Path
    shares: dict[str, Shares] = field(default_factory=dict)
    own_tasks: dict[str, str] = field(default_factory=dict)
    at_hand: list[str] = field(default_factory=list)
    made_up: dict[str, str] = field(default_factory=dict)
    sources: list[HubDataset] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def forget(self) -> None:
        """Remove what ``datasets`` has kept of these rows beside them."""
        for source in self.sources:
            source.forget(self.root)


def lay_out(configs: Sequence[RunConfig], root: Path, data_root: Path | None) -> StandInData:
    """Write the rows of every task that some runs learn or calibrate on.

    Args:
        configs: Of the runs, as the campaign has them.
        data_root: Where the real data sets may lie; None is the hub's offline cache. The hub itself is not asked.

    Raises:
        DataError: A data set is not at hand and its task makes no rows up, or an own task's file cannot be read.
    """
    data = StandInData(root)
    contents: dict[HubDataset, dict[str, Any]] = {}
    for tasks in _by_source(configs):
        each = [used_by(name, task, configs) for name, task in tasks.items()]
        used = together(each)
        name, task = next(iter(tasks.items()))
        hub = HubOriginal(task.source, data_root) if isinstance(task.source, HubDataset) else None
        official = hub.num_rows if hub else num_rows_of(task.source)
        shares = widest([shares_of(one, official) for one in each])
        data.shares |= dict.fromkeys(tasks, shares)
        few: dict[Split, int] = {
            split: scaled_official(official[split], used.of(split), shares.of(split))
            for split in SPLITS
            if official[split]
        }
        if hub:
            contents[hub.source] = hub.few(few)
            data.sources.append(hub.source)
            if hub.missing:
                data.made_up[hub.source.name] = hub.missing
            else:
                data.at_hand.append(hub.source.name)
        elif isinstance(task.source, FileSource):
            data.own_tasks[name] = str(copy_own_task(Path(name), task.source, few, root / "own-tasks" / task.name))
    write_hub_folders(root, contents)
    for name in data.shares:
        data.texts += _texts(find_task(data.own_tasks.get(name, name)), root)
    return data


def _by_source(configs: Sequence[RunConfig]) -> list[dict[str, Task]]:
    """The tasks that runs learn or calibrate on; those whose rows are of one data set are shrunk together."""
    found: dict[str, dict[str, Task]] = {}
    for name in dict.fromkeys(name for c in configs for name in (c.task, c.calibration_task) if name is not None):
        task = find_task(name)
        source = task.source.name if isinstance(task.source, HubDataset) else name
        found.setdefault(source, {})[name] = task
    return list(found.values())


def _texts(task: Task, root: Path) -> list[str]:
    examples = (
        task.to_example(row, f"{split}-{number}")
        for split in SPLITS
        for number, row in enumerate(task.source.rows(split, root))
    )
    return ["".join((e.prompt, e.completion, *e.choices)) for e in islice(examples, TEXTS_OF_A_TASK)]
