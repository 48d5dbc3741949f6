"""The labels of methods, tasks and axis values in a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from frozencore.tune.methods import METHODS, method_name
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
"""Axes whose values need no axis name."""
WHITENING = {"none": "None", "input": "Input only", "output": "Output only", "both": "Both"}


def axis_name(axis: str) -> str:
    return AXES.get(axis, axis.replace("_", " "))


def column_label(name: str) -> str:
    """The label of a method, or of a variant with its method's label first: ``lora-r1`` is ``LoRA r1``."""
    if name in METHODS:
        return method_name(name)
    method = max((known for known in METHODS if name.startswith(f"{known}-")), key=len, default="")
    return method_name(method) + name.removeprefix(method).replace("-", " ")


def value_name(axis: str, value: Any) -> str:
    """The short form of a value: ``("q_proj", "v_proj")`` as ``q/v``."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        names = TASKS if axis == "calibration_task" else {}
        return "/".join(names.get(str(part), str(part).removesuffix("_proj")) for part in value)
    if isinstance(value, float):
        return f"{value:g}"
    if axis == "method":
        return column_label(str(value))
    known = {"task": TASKS, "calibration_task": TASKS, "whiten": WHITENING}.get(axis, {})
    return known.get(str(value), str(value))


def full_name(axis: str, value: Any) -> str:
    """A value with its axis if the value alone is unclear: ``r 16``."""
    shown = value_name(axis, value)
    return shown if axis in NO_NAME and value is not None else f"{axis_name(axis)} {shown}"


def column_name(axes: Sequence[str], values: Sequence[Any]) -> str:
    """The label of a row or column from the values of its axes: ``FCCA, r 16``."""
    return ", ".join(full_name(axis, value) for axis, value in zip(axes, values, strict=True))


def titled(title: str, group: Mapping[str, Any]) -> str:
    """A study's title with the values that distinguish one of its tables."""
    return ", ".join([title, *(full_name(axis, value) for axis, value in group.items())])


def family_of(task: str) -> str | None:
    """The paper's family of a task, by its name or the paper's label."""
    plain = task.casefold()
    families = (
        family for family, names in FAMILIES.items() for name in names if plain in (name, TASKS[name].casefold())
    )
    return next(families, None)


def slug(group: Mapping[str, Any]) -> str:
    """Values as part of a file's name: ``-small-q-v``."""
    shown = (value_name(axis, value).lower() for axis, value in group.items())
    return "".join(f"-{re.sub('[^a-z0-9.]+', '-', value).strip('-')}" for value in shown)


def sentence(text: str) -> str:
    """The text with a capital letter at its start."""
    return text[:1].upper() + text[1:]
