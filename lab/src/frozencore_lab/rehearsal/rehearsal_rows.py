"""The rows of a rehearsal: a few of each data set, real or made up, and the place that makes runs use them.

They are written like the hub's own files, so that a rehearsal tests the real code for reading, splitting and checking
rows. If the real run trains on all rows of the official split, so does the rehearsal; otherwise some rows are left
over. A user's own tasks and the pocket tasks are used unchanged. A run keeps its identity, so that plan, store and
report are those of the real campaign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.files.hub import without_hub
from frozencore.tune.rows.prompts import PROTOCOL_MAX_LENGTH
from frozencore.tune.run.config import RunConfig
from frozencore.tune.suite import find_task
from frozencore.tune.tasks import Split, Task
from frozencore.tune.tasks.hub_rows import HubDataset, write_hub_folders
from frozencore.tune.tasks.splits import VALIDATION_SHARE
from frozencore_lab.campaign.worker import Place

EVALUATED = 6
FEWEST_TRAINED = 4
MOST_EPOCHS = 2
STEPS = 2  # the fewest for measuring the time of a step
TOKENS_OF_A_ROW = 8  # the least tokens of a row
TEXTS_OF_A_TASK = 200
CALIBRATED = 4
MOST_NEW_TOKENS = 3  # a random model does not end its answers
LONGER = 4  # factor on token limits, because the stand-in's tokenizer has few pieces
IN_16_BITS = ("bfloat16", "float16")
SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")


@dataclass(frozen=True)
class RehearsalPlace(Place):
    """Make runs use stand-ins.

    Attributes:
        num_train: The number of training rows of each task.
        stand_ins: Models with a stand-in tokenizer.
        tasks_in_16_bits: Tasks that keep the campaign's 16 bits; other tasks use 32 bits.
        is_quick: Use 32 bits everywhere, and all examples of an optimizer step at once.
    """

    num_train: dict[str, int] = field(default_factory=dict)
    stand_ins: tuple[str, ...] = ()
    tasks_in_16_bits: tuple[str, ...] = ()
    is_quick: bool = False

    def put(self, config: RunConfig) -> RunConfig:
        """The run with fewer rows, epochs, calibration examples and generated tokens."""
        assert config.task is not None
        task = find_task(config.task)
        changes: dict[str, Any] = {
            "num_train": min(self.num_train[config.task], config.num_train or task.num_train),
            "num_evaluation": min(EVALUATED, config.num_evaluation or task.num_evaluation),
            "calibration_size": max(fewest_calibrated(config), min(CALIBRATED, config.calibration_size)),
            "epochs": epochs_of(task, config),
            "max_new_tokens": min(MOST_NEW_TOKENS, config.max_new_tokens or task.max_new_tokens),
        }
        if config.model in self.stand_ins and not config.truncate:
            changes["max_length"] = LONGER * (config.max_length or PROTOCOL_MAX_LENGTH)
        if self.is_quick or (config.dtype in IN_16_BITS and config.task not in self.tasks_in_16_bits):
            changes["dtype"] = "float32"
        if self.is_quick:
            changes |= {"batch_size": config.rows_a_step, "accumulation": 1}
        return super().put(config.model_copy(update=changes))


@dataclass
class FewRows:
    """The rehearsal's rows of a campaign.

    Attributes:
        root: The folder of the rows: a run's ``data_root``.
        num_train: The number of training rows of each task.
        at_hand: Data sets with real rows.
        made_up: Data sets with made-up rows, and the reason.
        sources: The data sets under ``root``.
        texts: Some of the rows as text, to train a tokenizer.
    """

    root: Path
    num_train: dict[str, int] = field(default_factory=dict)
    at_hand: list[str] = field(default_factory=list)
    made_up: dict[str, str] = field(default_factory=dict)
    sources: list[HubDataset] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def forget(self) -> None:
        """Remove ``datasets``' cached copies of these rows."""
        for source in self.sources:
            source.forget(self.root)


def lay_out(configs: Sequence[RunConfig], root: Path, data_root: Path | None) -> FewRows:
    """Write the rows of every task that the runs read.

    Args:
        configs: The campaign's configurations of the runs.
        data_root: The folder of the real data sets; None is the hub's offline cache. The hub itself is not used.

    Raises:
        DataError: A data set is not available and cannot be made up, or a user's own file cannot be read.
    """
    rows = FewRows(root)
    contents: dict[HubDataset, dict[str, Any]] = {}
    for tasks in _by_source(configs):
        each = [(task, config) for name, task in tasks.items() for config in configs if name in tasks_of(config)]
        num_train = max(rows_to_train(task, config) for task, config in each)
        rows.num_train |= dict.fromkeys(tasks, num_train)
        source = next(iter(tasks.values())).source
        if isinstance(source, HubDataset):
            used = max(config.num_train or task.num_train for task, config in each)
            contents[source] = _few(rows, source, data_root, num_train, used)
            rows.sources.append(source)
    write_hub_folders(root, contents)
    for name in rows.num_train:
        rows.texts += _texts(find_task(name), root)
    return rows


def tasks_of(config: RunConfig) -> tuple[str, ...]:
    """The tasks that a run learns, calibrates on, or measures forgetting on."""
    return tuple(name for name in (config.task, *config.calibration_tasks, *(config.forgetting or ())) if name)


def rows_to_train(task: Task, config: RunConfig) -> int:
    """The fewest rows for ``STEPS`` steps and a calibration, if a tenth of the rows is held out for validation."""
    steps_an_epoch = math.ceil(STEPS / epochs_of(task, config))
    trained = max(FEWEST_TRAINED, fewest_calibrated(config), (steps_an_epoch - 1) * config.rows_a_step + 1)
    return next(n for n in count(trained) if n - max(1, round(VALIDATION_SHARE * n)) >= trained)


def fewest_calibrated(config: RunConfig) -> int:
    """The fewest calibration examples with at least one token for each direction of a basis."""
    return math.ceil(config.rank / TOKENS_OF_A_ROW)


def epochs_of(task: Task, config: RunConfig) -> int:
    """Epochs of a rehearsed run: the real run's, but at most two."""
    return min(MOST_EPOCHS, config.epochs or task.epochs)


def _by_source(configs: Sequence[RunConfig]) -> list[dict[str, Task]]:
    """The tasks that runs read, grouped by equal rows."""
    found: dict[object, dict[str, Task]] = {}
    for name in dict.fromkeys(name for config in configs for name in tasks_of(config)):
        task = find_task(name)
        found.setdefault(task.source if isinstance(task.source, HubDataset) else name, {})[name] = task
    return list(found.values())


def _few(rows: FewRows, source: HubDataset, data_root: Path | None, num_train: int, used: int) -> dict[str, Any]:
    """A few rows of each official split, as ``datasets.Dataset`` by the split's name.

    Args:
        used: The most rows that a real run trains on.
    """
    from datasets import Dataset

    real: dict[Split, Any] = {}
    try:
        with without_hub():
            real = {split: source.rows(split, data_root) for split in SPLITS}
        rows.at_hand.append(source.name)
    except DataError as error:
        if not source.sample:
            raise
        rows.made_up[source.name] = str(error)
    found = {}
    for split, name in source.splits.items():
        official = len(real[split]) if real else source.num_rows.get(str(name), 0)
        num = (num_train if used >= official else num_train + EVALUATED) if split == "train" else EVALUATED
        num = min(num, official)
        if real and num:
            found[str(name)] = real[split].select([place * official // num for place in range(num)])
        elif num:  # spread over the split, because it may be sorted by labels
            rng = Random(f"{source.name} {split}")
            found[str(name)] = Dataset.from_list([source.made_up(rng, number) for number in range(num)])
    return found


def _texts(task: Task, root: Path) -> list[str]:
    examples = (
        task.to_example(row, f"{split}-{number}")
        for split in SPLITS
        for number, row in enumerate(task.source.rows(split, root))
    )
    return ["".join((e.prompt, e.completion, *e.choices)) for e in islice(examples, TEXTS_OF_A_TASK)]
