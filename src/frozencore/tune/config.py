"""The configuration of a run: a part for each step, and the flat names of their options.

    config = make_config(model="pocket", data="rows.jsonl", rank=8)
    config.method.r

Flags, YAML keys, the JSON schema and records use the flat names, which are the names of the parts' fields
(:mod:`frozencore.tune.config_parts`). Three rules cover the rest: a part's field ``name`` has the name of its part
(``model``, ``method``), an option that several parts have (``seed``) is one option, and an option whose name in Python
is PEFT's has ours (:data:`frozencore.options.COMMAND_NAMES`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.constructors import CONSTRUCTORS
from frozencore.errors import ConfigError
from frozencore.files.strict_yaml import as_yaml
from frozencore.options import COMMAND_NAMES, ConfigPart, Option, options_of
from frozencore.text import flag_of, unknown_name
from frozencore.tune.config_parts import ModelConfig, RowsConfig, ScoringConfig, TrainingConfig
from frozencore.tune.methods import MethodConfig, core_options
from frozencore.tune.rows.sources import TASK, find_source, is_named

PLACES = ("data_root", "device")
"""Options of the machine, which do not change the results."""

GROUPS = frozenset({"core", "calibration"})
"""Options that records nest one level deeper."""


ALIASES = {"task": "data", "calibration_task": "calibration_data"}
"""Other names of options, whose values are names of tasks."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(ConfigPart):
    """One run of the training recipe (paper, section 4 and appendix B); see the head of this file."""

    model: ModelConfig
    rows: RowsConfig
    method: MethodConfig
    training: TrainingConfig
    scoring: ScoringConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        others = self.scoring.forgetting or ()
        for data in (*self.rows.sources, self.rows.calibration_data, *others):
            if data is not None and is_named(data):
                find_source(data)
        if same := {*others} & {*self.rows.sources}:
            raise ConfigError(f"--forgetting is of other tasks, but the run learns {same.pop()}. Leave it out there.")

    def content(self, *, changed: bool = False) -> dict[str, Any]:
        """The options as JSON values by flat name, as in records, which nest those of ``core`` and ``calibration``.

        Args:
            changed: Leave out options that are at their defaults.
        """
        found: dict[str, Any] = {}
        for name, option in run_options().items():
            value = option.value_in(self)
            if changed and value == option.default:
                continue
            place = found.setdefault(option.group, {}) if option.group else found
            place[name] = as_json(value)
        return found

    def replaced(self, **values: Any) -> RunConfig:
        """A copy with other values of some options."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            for part, field in run_options()[name].paths:
                parts.setdefault(part, {})[field] = value
        return replace(self, **{part: replace(getattr(self, part), **changed) for part, changed in parts.items()})


@dataclass(frozen=True, eq=False)
class RunOption(Option):
    """An option of a run, and its places in the configuration.

    Attributes:
        paths: Attribute names that lead to it, mostly one path: ``("method", "core", "damping")``.
    """

    paths: tuple[tuple[str, ...], ...] = ()

    @property
    def part(self) -> str:
        """The first part that has it."""
        return self.paths[0][0]

    @property
    def group(self) -> str | None:
        """The group in which records nest it, ``core`` or ``calibration``; None for the others."""
        group = self.paths[0][1]
        return group if group in GROUPS else None

    def value_in(self, config: RunConfig) -> Any:
        """Its value in a configuration."""
        holder: Any = config
        for name in self.paths[0]:  # a constructor may have been registered after the configuration was made
            holder = holder.get(name, self.default) if isinstance(holder, dict) else getattr(holder, name)
        return holder


def run_options() -> Mapping[str, RunOption]:
    """Every option of a run by its flat name, in the order of the parts."""
    return _options_of_table(tuple(row.options for row in CONSTRUCTORS.values()))


@cache
def _options_of_table(_table: tuple[type, ...]) -> Mapping[str, RunOption]:
    found: dict[str, RunOption] = {}
    for path, option in _walk(RunConfig):
        part, *_, name = path
        name = part if name == "name" else COMMAND_NAMES.get(name, name)
        known = found.get(name)
        if known is not None and known.meaning != option.meaning:
            raise ConfigError(f"An option has one meaning, but {name!r} has two. Rename that of the constructor.")
        paths = (*(known.paths if known else ()), path)
        found[name] = RunOption(name, option.type, option.default, paths)
    return found


def _walk(holder: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Option]]:
    """Every option of a dataclass and of the dataclasses in it, with the names that lead to it."""
    for name, option in options_of(holder).items():
        if name == "core":
            yield from (((*path, name, inner), one) for inner, one in core_options().items())
        elif isinstance(option.type, type) and is_dataclass(option.type):
            yield from _walk(option.type, (*path, name))
        elif option.help:
            yield (*path, name), option


def as_json(value: Any) -> Any:
    """The value of an option as JSON and YAML have it."""
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def as_flags(config: RunConfig, *, many: bool = False) -> str:
    """Write the options that are not at their defaults as the text of a file for ``--config``.

    Args:
        many: The file is for ``tune-many``, whose rows are those of ``--tenants``.
    """
    given: dict[str, Any] = {}
    for name, option in run_options().items():
        value = option.value_in(config)
        if value != option.default:
            key = "tenants" if many and name == "data" else name.replace("_", "-")
            given[key] = "none" if value is None else as_json(value)
    return as_yaml(given)


def make_config(*, strict: bool = False, **values: Any) -> RunConfig:
    """Make a checked configuration from options by flat name, or in the form of a record.

    ``task="sst2"`` is ``data="task:sst2"``, and ``calibration_task`` likewise ``calibration_data``.

    Args:
        strict: The values are keys of a file, so errors name them as keys and not as flags.

    Raises:
        ConfigError: An option is unknown or wrong; the message names it.
    """
    known = run_options()
    for group in GROUPS & values.keys():
        if not isinstance(given := values.pop(group), Mapping):
            raise ConfigError(f"{group} must hold options by name, but {given!r:.200} was given.")
        values |= given
    for alias, name in ALIASES.items():
        if (task := values.pop(alias, None)) is not None:
            if values.get(name) is not None:
                raise ConfigError(f"{flag_of(alias)} {task} is {flag_of(name)} {TASK}:{task}. Leave one of them out.")
            values[name] = f"{TASK}:{task}"
    nested: dict[str, dict[str, Any]] = {part: {} for part in options_of(RunConfig)}
    nested["method"] = {"given": frozenset(values), "core": {}, "calibration": {}}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(unknown_name("option", name, known))
        checked = known[name].validate(value, name if strict else flag_of(name))
        for *parts, field in known[name].paths:
            holder = nested
            for part in parts:
                holder = holder[part]
            holder[field] = checked
    for name, option in known.items():
        if option.default is MISSING and name not in values:
            raise ConfigError(f"A run needs {flag_of(name)}: {option.help}")
    nested["method"]["calibration"] = CalibrationOptions(**nested["method"]["calibration"])
    return RunConfig(**{part: option.type(**nested[part]) for part, option in options_of(RunConfig).items()})
