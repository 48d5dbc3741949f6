"""``--config run.yaml``: a file with the flags of a verb. A flag on the command line overrides the file.

A key is a flag without its dashes, ``learning-rate`` or ``learning_rate``. Several values are a list.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from frozencore.cli.help import FLAGS_ELSEWHERE
from frozencore.errors import ConfigError
from frozencore.files.strict_yaml import read_yaml
from frozencore.tune.config import GROUPS, RunConfig
from frozencore.words import nearest_name


def _take(context: typer.Context, file: Path | None) -> Path | None:
    """Use the file's values as the defaults of the verb's flags."""
    if file is not None:
        context.default_map = _values(file, context)
    return file


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of flags without their dashes, `learning-rate: 1e-3`; the command line overrides it.",
        is_eager=True,
        callback=_take,
    ),
]


def _values(file: Path, context: typer.Context) -> dict[str, Any]:
    """Read the file's values by the names of the verb's parameters.

    Raises:
        ConfigError: A key is not a flag of the verb, or a value is not allowed; the message names it.
    """
    given = read_yaml(file)
    if not isinstance(given, dict):
        raise ConfigError(f"{file} must hold flags as `rank: 8`, a line each.")
    flags = {
        spelled.removeprefix("--"): parameter
        for parameter in context.command.params
        for spelled in parameter.opts
        if spelled not in ("--help", "--config")
    }
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("_", "-")
        if name not in flags:
            near = FLAGS_ELSEWHERE.get(f"--{name}", "").removeprefix("--") or nearest_name(name, flags)
            meant = f"Did you mean {near}?" if near else f"See `frozencore {context.info_name} --help`."
            raise ConfigError(
                f"{file} has the key {str(key)!r:.80}, which `{context.info_name}` does not know. {meant}"
            )
        parameter = flags[name]
        if parameter.name in values:
            raise ConfigError(f"{file} gives {name} twice, by its two names. Leave one out.")
        if value is not None:
            several = getattr(parameter, "multiple", False)
            values[str(parameter.name)] = _as_typed(value, f"{file}, {name}", several=several)
    return values


def _as_typed(value: Any, where: str, *, several: bool) -> Any:
    """Convert a value to its form on the command line: True for a flag without a value, or text."""
    if isinstance(value, bool):
        return value
    parts = value if isinstance(value, list) else [value]
    if any(part is None or isinstance(part, list | dict) for part in parts):
        raise ConfigError(
            f"{where}: a value is a number, a word, yes or no, or a list of such, but {value!r:.80} came."
        )
    return list(map(str, parts)) if several else ",".join(map(str, parts))


def as_flags(config: RunConfig, *, changed: bool = False) -> str:
    """Write a configuration as the text of such a file, with every option that has a value.

    Args:
        changed: Leave out options that are at their defaults.
    """
    values = config.content(changed=changed)
    for group in GROUPS:
        values |= values.pop(group, {})
    given = {name.replace("_", "-"): value for name, value in values.items() if value is not None}
    return yaml.safe_dump(given, sort_keys=False)
