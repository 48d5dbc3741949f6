"""Flags made from the options of a run: each option is one flag, with its default, its help and its group.

``--config run.yaml`` gives the same flags from a file: a key is a flag without its dashes, ``learning-rate`` or
``learning_rate``. A flag on the command line overrides the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from frozencore.cli.display import console
from frozencore.cli.foreign_flags import counterpart
from frozencore.cli.verbs import NOTHING_KEPT
from frozencore.constructors import described
from frozencore.errors import ConfigError
from frozencore.files.names import RUN_FILE
from frozencore.files.strict_yaml import read_yaml
from frozencore.options import Option
from frozencore.text import flag_of, nearest_name, one_line
from frozencore.tune.config import ALIASES, make_config, run_options
from frozencore.tune.locate import other_files
from frozencore.tune.methods import METHODS
from frozencore.tune.rows.sources import TASK, source_kind

PANELS = {
    "model": "Model", "rows": "Rows", "method": "Method and bases", "training": "Training", "scoring": "Scoring",
    "verb": "Run",
}  # fmt: skip
"""The groups of flags in the help, by the part of the configuration; the last is for the flags of one verb."""
METAVARS = {int: "<int>", float: "<float>", Path: "<path>"}
SPELLED = {"learning_rate": ("--lr", "--learning-rate")}


def flag(name: str, help_text: str | None = None) -> Any:
    """Typer's flag of one option of a run, for a verb that takes a few; ``help_text`` replaces the option's help."""
    option = run_options()[name]

    def check(given: Any) -> Any:
        option.parse(given, flag_of(name))
        return given

    return typer.Option(help=help_text or help_of(option), autocompletion=_completions(option), callback=check)


def _take_resumed(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Use the options of the run in ``--out`` as the defaults of the flags if the run is resumed."""
    context.meta[str(param.name)] = value
    out, resumed = context.meta.get("output"), context.meta.get("resume")
    if resumed and out is not None:
        file = Path(out) / RUN_FILE

        def refuse() -> None:  # called only if neither the command line nor a file names the model
            raise ConfigError(
                f"--resume continues the run in --out, but there is nothing to resume in {out}: it has no "
                f"{RUN_FILE}. Give its folder, or --model and the other options of a new run."
            )

        of_run = _flags_in(context, file) if file.is_file() else {"model": refuse}
        context.default_map = {**of_run, **(context.default_map or {})}
    return value


Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "--output", help="New folder for adapters and records.", is_eager=True, callback=_take_resumed
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the run that is in --out, with its options.", is_eager=True, callback=_take_resumed
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing: say what the run would read and need, show its first rows.")
]


class RunCommand:
    """A verb for typer: the parameter ``config`` becomes a flag for each option of a run.

    Args:
        without: Options that the verb does not take.
    """

    def __init__(self, verb: Callable[..., None], *, without: Collection[str] = ()) -> None:
        self._verb, self._without = verb, without
        self.__name__, self.__annotations__ = verb.__name__, {}

    @property
    def __signature__(self) -> Signature:  # of the current table of constructors
        flags = [self._flag(option) for name, option in run_options().items() if name not in self._without]
        flags += [_task_flag(alias) for alias, name in ALIASES.items() if name not in self._without]
        of_verb = dict(signature(self._verb, eval_str=True).parameters)
        of_verb["config_file"] = Parameter("config_file", Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
        for name, parameter in of_verb.items():
            if name != "config":
                _, info = get_args(parameter.annotation)
                info.rich_help_panel = info.rich_help_panel or PANELS["verb"]
                flags.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        order = list(PANELS.values())
        return Signature(sorted(flags, key=lambda one: order.index(get_args(one.annotation)[1].rich_help_panel)))

    def __call__(self, **given: Any) -> None:
        known, context = run_options(), given.pop("config_file")
        tasks = {alias: task for alias in ALIASES if (task := given.pop(alias, None)) is not None}
        of_verb = {name: value for name, value in given.items() if name not in known}
        named = [name for name in known.keys() & given.keys() if context.get_parameter_source(name).name != "DEFAULT"]
        values = {name: known[name].parse(given[name], flag_of(name)) for name in named}
        if (tenants := of_verb.get("tenants")) is not None:
            if values.get("data") is not None or "task" in tasks:
                raise ConfigError("--tenants and --data name the same thing. Leave one out.")
            values["data"] = str(tenants)
        self._verb(make_config(**values, **tasks), **of_verb)

    def _flag(self, option: Any) -> Parameter:
        """Typer's flag of an option. Values are read as text, so that each wrong one is refused in the same words."""
        default = option.default
        is_switch = option.kinds == (bool,)
        kind: Any = list[str] if option.is_repeated else bool if is_switch else str
        info = typer.Option(
            *SPELLED.get(option.name, (flag_of(option.name),)),
            help=help_of(option),
            metavar=None if is_switch else METAVARS.get(option.kinds[0], "<text>"),
            autocompletion=_completions(option),
            rich_help_panel=PANELS[option.part],
        )
        if default is not MISSING and default is not None and kind is str:
            default = str(default)
        return Parameter(
            option.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is MISSING else default,
            annotation=Annotated[kind | None if default is None else kind, info],
        )


def help_of(option: Option) -> str:
    """The help of an option: its description, the constructors that read it, and its values."""
    text = described(option)
    if option.name == "method":
        words = (f"{name} ({row.basis_source})" if row.basis_source else name for name, row in METHODS.items())
        text = f"{text.rstrip('.')}, with the source of its bases or the kind of its values: {', '.join(words)}."
    if any(get_origin(kind) is Literal for kind in option.kinds[:1]):
        text += f" {option.text_rule.capitalize()}."
    if option.takes_several and not option.is_repeated:
        text += " Several are separated by commas."
    return text


def _completions(option: Option) -> Callable[[str], list[str]]:
    """A shell's completions of the value: the values of a short list, or methods."""
    allowed = [str(value) for kind in option.kinds if get_origin(kind) is Literal for value in get_args(kind)]
    allowed += METHODS if option.name == "method" else ()

    def beginning_with(incomplete: str) -> list[str]:
        return [value for value in allowed if value.startswith(incomplete)]

    return beginning_with


def _task_flag(alias: str) -> Parameter:
    """A flag that names a task for an option whose value is a source of rows."""

    def beginning_with(incomplete: str) -> list[str]:
        kind = source_kind(TASK)
        return [name for name in (kind.names if kind else ()) if name.startswith(incomplete)]

    option = flag_of(ALIASES[alias])
    info = typer.Option(
        flag_of(alias), help=f"A task of the lab, such as sst2, or its YAML file: {option} {TASK}:NAME.",
        metavar="<text>", autocompletion=beginning_with, rich_help_panel=PANELS["rows"],
    )  # fmt: skip
    return Parameter(alias, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, info])


def require_out(output: Path | None) -> Path:
    if output is None:
        raise ConfigError("A run needs a new folder, but none is named. Give --out DIR, or --dry-run to write nothing.")
    return output


def print_unread_files(tenants: Path) -> None:
    """Name the files in a folder of tenants that are not row files."""
    if others := other_files(tenants):
        line = f"Not rows of a tenant, so not read: {', '.join(others)} ({len(others)} in {tenants})"
        console.print(one_line(line, 1000), style="yellow", soft_wrap=True)


@contextmanager
def note_if_nothing_kept(kept: Callable[[], object]) -> Iterator[None]:
    """Note on Ctrl-C and SIGTERM whether the verb has left something to continue from."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        if not kept():
            end.add_note(NOTHING_KEPT)
        raise


def _take_file(context: typer.Context, file: Path | None) -> typer.Context:
    """Use a file's values as the defaults of the verb's flags; the context tells which flags are given."""
    if file is not None:
        context.default_map = {**(context.default_map or {}), **_flags_in(context, file)}
    return context


def _flags_in(context: typer.Context, file: Path) -> dict[str, Any]:
    """Read the flags of a verb from a file; keys that are no flags are refused."""
    given = read_yaml(file)
    if not isinstance(given, dict):
        raise ConfigError(f"{file} must hold flags as `rank: 8`, a line each.")
    flags = {
        spelled.removeprefix("--"): parameter
        for parameter in context.command.params
        for spelled in parameter.opts
        if spelled not in ("--help", "-h", "--config")
    }
    meant: dict[str, str] = {}
    for key in map(str, given):
        if (name := key.replace("_", "-")) not in flags:
            near = nearest_name(name, flags, similar=0.75)
            guess = f"Did you mean {near}?" if near else f"See `frozencore {context.info_name} --help`."
            meant[key] = counterpart(key) or guess
    if meant:
        keys = f"the key{'s' if len(meant) > 1 else ''} {', '.join(f'{key!r:.80}' for key in meant)}"
        says = " ".join(dict.fromkeys(meant.values()))
        raise ConfigError(f"{file} has {keys}, which `{context.info_name}` does not know. {says}")
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("_", "-")
        parameter = flags[name]
        if parameter.name in values:
            raise ConfigError(f"{file} gives {name} twice, by its two names. Leave one out.")
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, list | dict) for part in parts) or (None in parts and value is not None):
            raise ConfigError(
                f"{file}, {name}: a value is a number, a word, yes or no, or a list of such, but {value!r:.80} "
                "was given."
            )
        if isinstance(value, bool):  # YAML reads yes and no as these
            values[str(parameter.name)] = value if getattr(parameter, "is_flag", False) else "yes" if value else "no"
        elif value is not None:
            texts = list(map(str, parts))
            values[str(parameter.name)] = texts if getattr(parameter, "multiple", False) else ",".join(texts)
    return values


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of flags without their dashes, `learning-rate: 1e-3`; the command line overrides it.",
        is_eager=True,
        callback=_take_file,
    ),
]
