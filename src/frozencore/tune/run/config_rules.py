"""Which options of a run contradict one another, each in one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from frozencore.constructors import BasisOptions, refuse_unread
from frozencore.errors import ConfigError
from frozencore.tune.methods import find_method
from frozencore.tune.run.private_rules import refuse_uncounted
from frozencore.tune.suite import find_task
from frozencore.words import flag_of

if TYPE_CHECKING:
    from frozencore.tune.run.config import RunConfig

OF_OWN_ROWS = ("columns", "skip_bad", "packing")
OF_ONE_ALONE = ("padding_free", "report_to", "refresh", "private_epsilon")
"""How a training lays out its rows, who follows it, whether it leaves its basis, and whether it has a budget."""


def refuse_contradictions(config: RunConfig) -> None:
    """Refuse options that are allowed each by itself, but not together.

    Raises:
        ConfigError: A name is not known, or two options are not for one run.
    """
    if (config.task is None) == (config.data is None):
        raise ConfigError("A run learns either a task (--task NAME) or your own rows (--data FILE): give one.")
    if config.task is not None:
        find_task(config.task)
        for name in _given(config, OF_OWN_ROWS):
            raise ConfigError(f"{flag_of(name)} is of your own rows (--data), but a task came. Leave one out.")
    if config.calibration_task is not None:
        find_task(config.calibration_task)
    for name in config.forgetting or ():
        find_task(name)
    if config.task in (config.forgetting or ()):
        raise ConfigError(f"--forgetting is about other tasks, but the run learns {config.task!r}. Leave it out there.")
    find_method(config.method)
    refuse_unread(config.method, config.core.model_dump(exclude_defaults=True))
    for name in _given(config, config.method_entry.unread):
        raise ConfigError(f"The method {config.method!r} does not read {name}. Leave {flag_of(name)} out.")
    if config.basis is not None and config.layers is not None:
        raise ConfigError("A saved basis has its own layers: leave --layers out.")
    if config.packing and (config.truncate or config.skip_long):
        raise ConfigError("Packed texts may be of any length: leave --truncate and --skip-long out.")
    if config.patience is not None and config.select_checkpoint == "none":
        raise ConfigError("--patience counts scores on validation rows: give --select-checkpoint epoch as well.")
    if config.rank_budget is not None:
        _check_rank_budget(config)
    if config.refreshes:
        _refuse_refresh(config)
    refuse_uncounted(config)


def refuse_of_one_alone(config: RunConfig, these: str) -> None:
    """Refuse what trainings side by side cannot follow.

    Args:
        these: What trains so, in words.

    Raises:
        ConfigError: The first such option that came.
    """
    for name in _given(config, OF_ONE_ALONE):
        raise ConfigError(
            f"{flag_of(name)} is of a training alone, but {these} train side by side, on one basis and in common "
            "batches. Leave one out."
        )


def _given(config: RunConfig, names: Iterable[str]) -> Iterator[str]:
    """Those that are not at their defaults."""
    return (name for name in names if getattr(config, name) != type(config).model_fields[name].default)


def _check_rank_budget(config: RunConfig) -> None:
    budget = config.method_entry.budget
    if budget is None:
        raise ConfigError(f"A rank budget is for cores, but {config.method!r} has none: give --rank instead.")
    if budget == "instead of the rank" and config.rank != BasisOptions.rank:
        raise ConfigError(f"--rank-budget chooses the ranks, but --rank {config.rank} came too. Leave one out.")


def _refuse_refresh(config: RunConfig) -> None:
    if config.basis is not None:
        raise ConfigError("A refreshed adapter cannot share a basis with others: give --basis or --refresh.")
    method = config.method_entry
    if config.refresh == "auto" and (method.optimiser is not None or method.adds_up):
        raise ConfigError(f"auto counts the rounds of a core, but {config.method!r} has none: give --refresh a number.")
    if method.optimiser is not None:
        return
    if not method.adds_up and not config.moments_needed:
        raise ConfigError(
            f"Refreshing chooses bases by the training data, which the method {config.method!r} does not read. Use "
            "one that does, such as fcca, or one whose rounds add up, lora; or leave --refresh out."
        )
    if config.select_checkpoint != "none":
        raise ConfigError(
            "Of a training in rounds the last step is kept: the values of others are of rounds that are over. Give "
            "--select-checkpoint none or leave --refresh out."
        )
