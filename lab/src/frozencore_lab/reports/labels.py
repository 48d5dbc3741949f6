"""How methods, tasks and values of an axis are called in a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from frozencore.tune.methods import method_name
from frozencore.tune.suite import PAPER_TASKS

TASKS = {name: task.label or name for name, task in PAPER_TASKS.items()}
FAMILIES: dict[str, tuple[str, ...]] = {
    family: tuple(name for name, task in PAPER_TASKS.items() if task.family == family)
    for family in dict.fromkeys(task.family for task in PAPER_TASKS.values() if task.family is not None)
}
"""Families of the paper's tasks; other tasks have none."""

AXES = {
    "calibration_size": "calibration", "calibration_task": "calibrated on", "learning_rate": "lr", "rank": "r",
    "whiten": "whitening", "targets": "modules",
}  # fmt: skip
NO_NAME = ("method", "task", "model", "whiten", "targets", "calibration_task", "fisher", "coordinates")
"""Axes whose values speak for themselves."""
WHITENING = {"none": "None", "input": "Input only", "output": "Output only", "both": "Both"}


def axis_name(axis: str) -> str:
    return AXES.get(axis, axis.replace("_", " "))


def value_name(axis: str, value: Any) -> str:
    """A value as it is shown beside others of its axis: ``("q_proj", "v_proj")`` as ``q/v``."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return "/".join(str(part).removesuffix("_proj") for part in value)
    if isinstance(value, float):
        return f"{value:g}"
    if axis == "method":
        return method_name(str(value))
    known = {"task": TASKS, "calibration_task": TASKS, "whiten": WHITENING}.get(axis, {})
    return known.get(str(value), str(value))


def full_name(axis: str, value: Any) -> str:
    """A value with its axis where it does not speak for itself: ``r 16``."""
    shown = value_name(axis, value)
    return shown if axis in NO_NAME and value is not None else f"{axis_name(axis)} {shown}"


def column_name(axes: Sequence[str], values: Sequence[Any]) -> str:
    """A row or a column of a table by the values of its axes: ``FCCA, r 16``."""
    return ", ".join(full_name(axis, value) for axis, value in zip(axes, values, strict=True))


def family_of(task: str) -> str | None:
    """The paper's family of a task, by its name or as the paper prints it."""
    plain = task.casefold()
    for family, names in FAMILIES.items():
        if any(plain in (name, TASKS[name].casefold()) for name in names):
            return family
    return None


def slug(group: Mapping[str, Any]) -> str:
    """Values as part of a file's name: ``-small-q-v``."""
    shown = (value_name(axis, value).lower() for axis, value in group.items())
    return "".join(f"-{re.sub('[^a-z0-9.]+', '-', value).strip('-')}" for value in shown)


def free_name(name: str, taken: set[str]) -> str:
    """The name, or a longer one if a file has it: the study ``a-time`` and the times of ``a`` would share one."""
    while name in taken:
        name += "-too"
    taken.add(name)
    return name
