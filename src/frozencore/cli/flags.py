"""Make flags from the options of a run: each option is one flag, with its default and help."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, replace
from datetime import date
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import ValidationError

from frozencore.cli.flag_file import ConfigFile
from frozencore.cli.help import group_of, in_order
from frozencore.cli.verbs import NOTHING_KEPT
from frozencore.constructors import described
from frozencore.errors import ConfigError, own_refusal
from frozencore.options import Option
from frozencore.tune.config import make_config, run_options
from frozencore.tune.methods import METHODS
from frozencore.tune.suite import TASKS
from frozencore.words import flag_of

CONFIG = "config"
SPELLED = {"learning_rate": ("--lr", "--learning-rate")}
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run that is in --output.")]
Out = Annotated[Path | None, typer.Option("--output", "--out", help="New folder for adapters and records.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing: say what the run would read and need, show its first rows.")
]
_TYPES_OF_TYPER = (bool, int, float, str, Path)


class TakesOptions:
    """A verb for typer, with a flag for each option of a run that the verb takes.

    A parameter with the name of an option and a plain type takes this option; a text in ``Annotated`` replaces the
    option's help. A parameter ``config`` takes all options. Parameters with a ``typer.Option`` or ``typer.Argument``
    belong to the verb itself.

    Args:
        without: Options that are not part of ``config``.
        renamed: Other flags and help texts for some options; these options become required.
        defaults: Other defaults for some options.
        instead: Parameters of the verb that set the value of an option; only one of the two may be given.
        kept: Returns whether a verb that is ended early has left something in its output folder to continue from.
    """

    def __init__(
        self,
        verb: Callable[..., None],
        *,
        without: Collection[str] = (),
        renamed: Mapping[str, tuple[str, str]] | None = None,
        defaults: Mapping[str, Any] | None = None,
        instead: Mapping[str, str] | None = None,
        kept: Callable[[Path], object] | None = None,
    ) -> None:
        self._verb, self._without, self._renamed, self._defaults = verb, without, renamed or {}, defaults or {}
        self._instead, self._kept = instead or {}, kept
        self.__name__, self.__annotations__ = verb.__name__, {}

    def _parameters(self) -> dict[str, Parameter]:
        return dict(signature(self._verb, eval_str=True).parameters)

    @property
    def __signature__(self) -> Signature:
        known, parameters = run_options(), self._parameters()
        flags = {}
        if CONFIG in parameters:
            flags = {name: self._flag(known[name]) for name in known if name not in self._without}
            flags["config_file"] = Parameter("config_file", Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
        for name, own in parameters.items():
            if _is_own(own):
                flags[name] = own.replace(kind=Parameter.KEYWORD_ONLY)
            elif name != CONFIG:
                flags[name] = self._flag(known[name], next(iter(_metadata(own)), None))
        if CONFIG in parameters:
            flags = {name: _in_its_group(flags[name]) for name in in_order(flags)}
        return Signature(list(flags.values()))

    def __call__(self, **given: Any) -> None:
        given.pop("config_file", None)
        known, parameters = run_options(), self._parameters()
        own = {name: given.pop(name) for name, parameter in parameters.items() if _is_own(parameter)}
        values = {name: _read_value(known[name], value) for name, value in given.items()}
        for name, option in self._instead.items():
            if own[name] is None:
                continue
            if values[option] is not None:
                raise ConfigError(f"{flag_of(name)} and {flag_of(option)} name the same thing. Leave one out.")
            values[option] = own[name]
        if CONFIG in parameters:
            values = {CONFIG: make_config(**values)}
        try:
            self._verb(**values, **own)
        except (KeyboardInterrupt, SystemExit) as end:
            if self._kept is not None and not self._kept(own["output"]):
                end.add_note(NOTHING_KEPT)
            raise

    def _flag(self, option: Option, said: str | None = None) -> Parameter:
        """Make typer's flag of an option; values of types that typer does not know are read as text."""
        kinds = _kinds(option)
        kind = kinds[0] if len(kinds) == 1 and kinds[0] in _TYPES_OF_TYPER else str
        spelled: Sequence[str] = SPELLED.get(option.name, (flag_of(option.name),))
        default = self._defaults.get(option.name, option.default)
        if option.name in self._renamed:
            flag, said = self._renamed[option.name]
            spelled, default = (flag,), MISSING
        typed = default if default in (None, MISSING) or kind is not str else str(default)
        if _is_repeated(option) and option.name not in self._renamed:
            kind = list[str]
        info = typer.Option(
            *spelled,
            help=said or _help(replace(option, default=default)),
            metavar="YYYY-MM-DD" if kinds == [date] else None,
            autocompletion=_completions(option),
        )
        return Parameter(
            option.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if typed is MISSING else typed,
            annotation=Annotated[kind | None if _may_be_none(option) else kind, info],
        )


def _is_own(parameter: Parameter) -> bool:
    """Return whether a parameter belongs to the verb itself and is not an option of a run."""
    return any(not isinstance(extra, str) for extra in _metadata(parameter))


def _metadata(parameter: Parameter) -> tuple[Any, ...]:
    return getattr(parameter.annotation, "__metadata__", ())


def _in_its_group(flag: Parameter) -> Parameter:
    """Put a flag into its group of the help."""
    kind, info = get_args(flag.annotation)
    boxed = copy(info)
    boxed.rich_help_panel = group_of(flag.name).name
    return flag.replace(annotation=Annotated[kind, boxed])


def _completions(option: Option) -> Callable[[str], list[str]]:
    """Make a shell's completions of the value: the values of a short list, methods or tasks."""
    named: Mapping[str, Iterable[str]] = {"method": METHODS, "task": TASKS, "calibration_task": TASKS}
    allowed = [str(value) for kind in _kinds(option) if get_origin(kind) is Literal for value in get_args(kind)]

    def beginning_with(incomplete: str) -> list[str]:
        return [value for value in (*allowed, *named.get(option.name, ())) if value.startswith(incomplete)]

    return beginning_with


def _help(option: Option) -> str:
    said = described(option)
    if option.name == "method":
        said += f" One of {', '.join(METHODS)}."
    if any(get_origin(kind) is Literal for kind in _kinds(option)[:1]):
        said += f" {option.rule.capitalize()}."
    if _takes_several(option) and not _is_repeated(option):
        said += " Several are separated by commas."
    return said


def _read_value(option: Option, given: Any) -> Any:
    """Convert a flag's text to the option's type.

    Raises:
        ConfigError: The value is not allowed; the message names the flag and the allowed values.
    """
    if given in (None, []) or (given == "none" and option.default is not None and _may_be_none(option)):
        return None
    meant = [given]
    if isinstance(given, str) and _takes_several(option) and not _is_repeated(option):
        meant.append([part.strip() for part in given.split(",") if part.strip()])
    for value in meant:
        try:
            return option.adapter.validate_python(value)
        except ValidationError as error:
            refused = own_refusal(error.errors()[0])
    rule = option.rule if option.default is not None else option.rule.removesuffix(" or none")
    raise refused or ConfigError(f"{flag_of(option.name)} must be {rule}, but {given!r} came.")


def _takes_several(option: Option) -> bool:
    return any(get_origin(kind) is tuple for kind in _kinds(option))


def _is_repeated(option: Option) -> bool:
    """Return whether the flag is repeated for each value, because a value (a file name) may hold a comma."""
    return _takes_several(option) and str in _kinds(option)


def _may_be_none(option: Option) -> bool:
    return NoneType in _parts(option.plain)


def _kinds(option: Option) -> list[Any]:
    """The types of an option's values, without None."""
    return [kind for kind in _parts(option.plain) if kind is not NoneType]


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def require_out(output: Path | None) -> Path:
    """The folder of a run that writes one."""
    if output is None:
        raise ConfigError("A run needs a new folder, but none is named. Give --out DIR, or --dry-run to write nothing.")
    return output
